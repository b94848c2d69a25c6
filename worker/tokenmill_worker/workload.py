"""How much work this worker still has, and how fast it is with enough to do.

What an autoscaler needs, in the unit of the queue: tokens of prompts and, at most, of answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tokenmill._work import estimate_tokens
from tokenmill_engine.outputs import EngineStats

from .delivery import AllDeliveries, Delivery

#: The average forgets with this time constant.
MEMORY_S = 60.0
#: Measured at most so often: shorter intervals hold too few steps.
MIN_INTERVAL_S = 1.0


class Workload:
    """Reads `deliveries` and the engine's `stats`; `is_full` says that there is no room for another
    request. All calls on the event loop.
    """

    def __init__(
        self,
        deliveries: AllDeliveries,
        stats: Callable[[], EngineStats],
        is_full: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deliveries = deliveries
        self._stats = stats
        self._is_full = is_full
        self._clock = clock
        self._spared_tokens = 0
        self._measured_s = clock()
        self._measured_tokens = 0
        self._was_full = False
        self._capacity: float | None = None

    @property
    def capacity_tokens_per_s(self) -> float | None:
        """None: not measured yet."""
        return self._capacity

    def remaining_tokens(self) -> int:
        """Of all requests held: before the first token the prompt, and what is left of the answer,
        if that becomes as long as it may."""
        return sum(map(_remaining, self._deliveries))

    def ended(self, delivery: Delivery) -> None:
        """An answer shorter than it might have been takes its remaining work along."""
        self._spared_tokens += max(delivery.max_tokens - delivery.num_tokens, 0)

    def measure(self) -> None:
        """Called now and then.

        While the worker is full it is as fast as it gets, and its speed is averaged. Otherwise it
        may be half idle: then only a higher speed than the known one says something.
        """
        now_s = self._clock()
        interval_s = now_s - self._measured_s
        if interval_s < MIN_INTERVAL_S:
            return
        tokens = self._done_tokens()
        speed = (tokens - self._measured_tokens) / interval_s
        is_full, was_full = self._is_full(), self._was_full
        self._measured_s, self._measured_tokens = now_s, tokens
        self._was_full = is_full
        if speed <= 0:
            return
        if self._capacity is None:
            self._capacity = speed
        elif is_full and was_full:
            kept = math.exp(-interval_s / MEMORY_S)
            self._capacity = kept * self._capacity + (1 - kept) * speed
        else:
            self._capacity = max(self._capacity, speed)

    def _done_tokens(self) -> int:
        stats = self._stats()
        prompts = stats.prompt_tokens_total + stats.prefix_cache_hits_total
        return prompts + stats.generation_tokens_total + self._spared_tokens


def _remaining(delivery: Delivery) -> int:
    if delivery.prompt_tokens is None:
        return estimate_tokens(delivery.lease.body)
    prompt = 0 if delivery.latest is not None else delivery.prompt_tokens
    return prompt + max(delivery.max_tokens - delivery.num_output_tokens, 0)
