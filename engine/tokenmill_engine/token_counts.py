"""The distinct tokens of a request and how often each occurs in its output. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .request import Request

IdArray = npt.NDArray[np.int64]
_FIRST_CAPACITY = 64


class TokenCounts:
    """Kept up to date token by token; a function of the token ids alone, however they arrived."""

    __slots__ = ("_counts", "_ids", "_num_seen", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._num_seen = 0

    def update(self, request: Request) -> None:
        """Count the tokens that `request` gained since the last call."""
        for position in range(self._num_seen, request.num_tokens):
            slot = self._slot(request.token_ids[position])
            if position >= request.num_prompt_tokens:
                self._counts[slot] += 1
        self._num_seen = request.num_tokens

    @property
    def ids(self) -> IdArray:
        """Every token of prompt and output, once."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> IdArray:
        """Occurrences in the output, 0 for a token of the prompt only; parallel to `ids`."""
        return self._counts[: len(self._slots)]

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        return slot
