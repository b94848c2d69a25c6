"""What a sampling kernel must know of each request: one matrix, packed anew only as it changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .request import Request

#: Rows of the matrix of settings, 8 bytes each; float64 from TEMPERATURE on.
SEED, POSITION, TOP_K, TEMPERATURE, LOG_MIN_P, TOP_P = range(6)
NUM_SETTINGS = 6


def pack_settings(requests: Sequence[Request]) -> NDArray[np.int64]:
    """What the kernel must know of each request, `[NUM_SETTINGS, N]` 8-byte words.

    The noise is computed where the token is chosen, from the seed and the position of the token:
    a request has no state there, so nothing moves when it is preempted or taken over.
    """
    packed = np.empty((NUM_SETTINGS, len(requests)), np.int64)
    numbers = packed.view(np.float64)
    params = [request.params for request in requests]
    packed[SEED] = np.array([request.seed for request in requests], np.uint64).view(np.int64)
    packed[POSITION] = _positions(requests)
    packed[TOP_K] = [param.top_k for param in params]
    numbers[TEMPERATURE] = [0.0 if param.is_greedy else param.temperature for param in params]
    numbers[LOG_MIN_P] = [math.log(param.min_p) if param.min_p else -math.inf for param in params]
    numbers[TOP_P] = [param.top_p for param in params]
    return packed


class SettingsPacker:
    """Packs the settings of one step after another, whose requests are mostly the same."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._packed: NDArray[np.int64] | None = None  # None: all of them are greedy

    def __call__(self, requests: Sequence[Request]) -> NDArray[np.int64] | None:
        """As `pack_settings`, valid until the next call; None when all are greedy."""
        if self._requests == requests:  # compares identities, for requests define no equality
            if self._packed is not None:
                self._packed[POSITION] = _positions(requests)
            return self._packed
        self._requests = list(requests)
        is_greedy = all(request.params.is_greedy for request in requests)
        self._packed = None if is_greedy else pack_settings(requests)
        return self._packed


def _positions(requests: Sequence[Request]) -> list[int]:
    return [request.next_output_index for request in requests]
