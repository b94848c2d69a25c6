"""Token ids to text, one id at a time, never half a character.

Both streams decode a small window: the ids that yielded the last piece of text, as context for
joins and leading spaces, and the ids since then. A piece comes out unless it ends in U+FFFD, which
is what an incomplete character decodes to. Bytes that are no text at all therefore come out with
the next whole character, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """The pieces, concatenated, are the decoded text of all ids pushed."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """What is left, incomplete characters as U+FFFD. Push nothing more."""


class FastTextStream:
    """On `tokenizers.decoders.DecodeStream`, which leaves the flush at the end to its caller."""

    __slots__ = ("_backend", "_context", "_held", "_skip_special_tokens", "_stream")

    def __init__(self, backend: Backend, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text: str | None = self._stream.step(self._backend, token_id)
        if not text:
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        if not self._held:
            return ""
        context = self._decode(self._context)
        return self._decode(self._context + self._held)[len(context) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, self._skip_special_tokens)
        return text


class WindowTextStream:
    """For tokenizers that `DecodeStream` cannot serve: those in Python, and byte fallback.

    A decoder with byte fallback turns a whole run of byte tokens into U+FFFD when any part of it is
    no UTF-8, even characters that were complete and released before. Here what was released stays,
    and only the bytes after it are replaced: holding back whole runs would delay every line feed,
    which such vocabularies spell as a byte.
    """

    __slots__ = ("_context_text", "_decode", "_ids", "_num_context")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # context, then what is held
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return text

    def finish(self) -> str:
        return self._new_text() if len(self._ids) > self._num_context else ""

    def _new_text(self) -> str:
        text = self._decode(self._ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        del self._ids[: self._num_context]
        self._num_context, self._context_text = 0, ""
        return self._decode(self._ids)
