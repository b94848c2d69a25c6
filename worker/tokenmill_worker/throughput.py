"""How fast a counter grows of late: the mean over a window that slides along."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0
#: Samples closer together than this are one: several cards are written in the same moment.
MIN_GAP_S = 0.5


class Throughput:
    """Of a counter that only grows; asked now and then, it looks back to when it was asked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])

    def per_second(self, total: int) -> float:
        """Mean growth over about the last WINDOW_S seconds, up to `total` now."""
        now_s = self._clock()
        if now_s - self._samples[-1][0] >= MIN_GAP_S:
            self._samples.append((now_s, total))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        began_s, before = self._samples[0]
        return (total - before) / max(now_s - began_s, MIN_GAP_S)
