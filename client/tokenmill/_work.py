"""How much work a request is, in tokens: what an autoscaler adds up.

An estimate, made at the enqueue from the body alone, because no producer has the model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_core import from_json

from . import limits
from .protocol import SamplingParams

#: Text has about so many characters to a token, in most languages and vocabularies.
CHARS_PER_TOKEN: Final = 4
#: What a chat template puts around each message.
TOKENS_PER_MESSAGE: Final = 6
DEFAULT_MAX_TOKENS: Final[int] = SamplingParams.model_fields["max_tokens"].default


def estimate_tokens(body: str) -> int:
    """Tokens of the prompt and, at most, of the answer. Takes any text: a body that is no request
    will be refused by a worker, which is little work."""
    try:
        request = from_json(body)
    except ValueError:
        return 0
    if not isinstance(request, Mapping):
        return 0
    answer = request.get("max_tokens")
    if isinstance(answer, bool) or not isinstance(answer, int):
        answer = DEFAULT_MAX_TOKENS
    return _prompt_tokens(request) + min(max(answer, 0), limits.MAX_TOKENS)


def _prompt_tokens(request: Mapping[str, Any]) -> int:
    token_ids, messages = request.get("prompt_token_ids"), request.get("messages")
    if isinstance(token_ids, list):
        return len(token_ids)
    if isinstance(messages, list):
        return sum(map(_message_tokens, messages))
    return _text_tokens(request.get("prompt"))


def _message_tokens(message: object) -> int:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts: Sequence[object] = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return TOKENS_PER_MESSAGE + sum(map(_text_tokens, texts))


def _text_tokens(text: object) -> int:
    return -(-len(text) // CHARS_PER_TOKEN) if isinstance(text, str) else 0
