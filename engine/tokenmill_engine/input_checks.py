"""What a request brings, checked at admission: its text, and token ids against the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .errors import InvalidRequest
from .sampling_params import SamplingParams

BadWordEncoder = Callable[[tuple[str, ...]], Sequence[Sequence[int]]]


def check_text(field: str, text: object) -> str:
    """`text` itself. Raises InvalidRequest unless it is a text that UTF-8 can express."""
    if not isinstance(text, str):
        raise InvalidRequest(field, "must be a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            field, "must be valid Unicode; it holds half of a surrogate pair"
        ) from None
    return text


def check_token_ids(field: str, token_ids: Iterable[object], vocab_size: int) -> None:
    """Raises InvalidRequest unless all are whole numbers from 0 to `vocab_size` - 1."""
    for token_id in token_ids:
        is_int = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not (is_int and token_id in range(vocab_size)):
            raise InvalidRequest(
                field, f"must hold token ids of the vocabulary, 0 to {vocab_size - 1}"
            )


def check_prompt_token_ids(token_ids: Sequence[object], vocab_size: int) -> None:
    """Raises InvalidRequest for an empty prompt or an id outside the vocabulary."""
    if not token_ids:
        raise InvalidRequest("prompt_token_ids", "must hold at least one token id")
    check_token_ids("prompt_token_ids", token_ids, vocab_size)


def validate_params(
    params: SamplingParams, vocab_size: int, encode_bad_words: BadWordEncoder
) -> None:
    """Raises InvalidRequest naming the field; `vocab_size` is the width of the logits."""
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    for stop in params.stop:
        check_text("stop", stop)
    for token_ids in encode_bad_words(tuple(params.bad_words)) if params.bad_words else ():
        check_token_ids("bad_words", token_ids, vocab_size)
