"""The model's tokenizer: prompts and chats to token ids, ids to text."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .chat_template import ChatTemplate
from .errors import InvalidRequest, ModelLoadError
from .input_checks import check_text
from .text_stream import FastTextStream, TextStream, WindowTextStream

_CACHED_BAD_WORDS = 256


class Tokenizer:
    """Wraps a tokenizer of transformers; every method is safe to call from several threads."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self._hf: Any = hf  # transformers gives its methods no usable types
        self._backend: Backend | None = self._hf.backend_tokenizer if hf.is_fast else None
        self._streams = self._backend is not None and not _has_byte_fallback(self._backend)
        self._chat_template = ChatTemplate(hf)
        self._lock = threading.Lock()  # encoding switches settings of the backend back and forth
        self._cached_bad_word_ids = lru_cache(_CACHED_BAD_WORDS)(self._encode_bad_words)

    @classmethod
    def load(
        cls, name: str, revision: str | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """`name` is a folder or hub id. Raises ModelLoadError."""
        try:
            hf = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelLoadError(f"the tokenizer of {name} cannot be loaded: {error}") from error
        return cls(hf)

    def __len__(self) -> int:
        """Number of tokens; the model's vocabulary may be padded beyond it."""
        return len(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""
        added = self._hf.added_tokens_decoder.items()
        return frozenset(
            [*self._hf.all_special_ids, *(token_id for token_id, token in added if token.special)]
        )

    def encode(self, text: str) -> list[int]:
        """A prompt as token ids, with the special tokens that the tokenizer adds, as in vLLM.

        Raises InvalidRequest for an empty text or one that is not valid Unicode.
        """
        if not check_text("prompt", text):
            raise InvalidRequest("prompt", "must not be empty")
        token_ids = self._encode(text, add_special_tokens=True)
        if not token_ids:
            raise InvalidRequest("prompt", "has no tokens in this model's vocabulary")
        return token_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """A chat as token ids. A continued final message gets no generation prompt after it.

        `content` is a text or a list of `{"type": "text", "text": …}` parts, which are joined.

        Raises:
            InvalidRequest: a message is malformed, the template refuses it, or there is none.
            UnsupportedParameter: a part is not text, or a message has fields beyond a name.
        """
        with self._lock:
            return self._chat_template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; ids beyond the vocabulary have none."""
        return self._decode(list(token_ids), skip_special_tokens)

    def text_stream(self, *, skip_special_tokens: bool) -> TextStream:
        """`decode` for ids that come one at a time."""
        if self._streams and self._backend is not None:
            return FastTextStream(self._backend, skip_special_tokens=skip_special_tokens)
        return WindowTextStream(partial(self._decode, skip_special_tokens=skip_special_tokens))

    def bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell any of `words`, at the start of a text or after a space."""
        return self._cached_bad_word_ids(words)

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = check_text("bad_words", word).lstrip()
            for text in (bare, f" {bare}"):
                if token_ids := self._encode(text, add_special_tokens=False):
                    found[tuple(token_ids)] = None
        return tuple(found)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            token_ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Without the clean-up of spaces, which rewrites text that was streamed already."""
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            text = self._hf.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return text


def _has_byte_fallback(backend: Backend) -> bool:
    """Whether characters outside the vocabulary decode from tokens like `<0xE2>`."""
    # Only the decoder's JSON, as it is pickled: the whole tokenizer's has the vocabulary in it.
    state = b"{}" if backend.decoder is None else backend.decoder.__getstate__()
    return '"type":"ByteFallback"' in json.dumps(json.loads(state), separators=(",", ":"))
