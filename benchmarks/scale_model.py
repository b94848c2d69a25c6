"""A model of what a token costs Redis, fitted to runs and checked against them.

    µs per token = (call_us / streams per call + event_us) / tokens per event
                   + request_us / tokens per answer

A worker writes the events of all its streams in calls of up to 128 (`append`), for each partition
apart, so the cost of a call is shared by so many; an event may carry several tokens (`--flush-ms`,
or a slow Redis); a request is enqueued, leased, ended and forgotten once.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill import limits

from .scale_run import Row


@dataclass(frozen=True, slots=True)
class Model:
    """CPU time of the server, in µs; `idle_ms_s` is ms per second and worker."""

    call_us: float
    event_us: float
    request_us: float
    idle_ms_s: float
    median_error: float  # of the runs that it was fitted to, as a share
    worst_error: float

    def redis_us(self, *, batch: float, tokens: float, tokens_per_event: float = 1.0) -> float:
        """Per token, for `batch` streams per worker and answers of `tokens` tokens."""
        call, event, request = _shares(batch, tokens, tokens_per_event)
        return self.call_us * call + self.event_us * event + self.request_us * request

    def tok_s_of_a_core(self, *, workers: int, batch: float, **shape: float) -> float:
        """Tokens per second at which one core of Redis is busy all the time."""
        left = max(0.0, 1 - workers * self.idle_ms_s / 1e3)
        return left * 1e6 / self.redis_us(batch=batch, **shape)


def fit(rows: Sequence[Row]) -> Model:
    """Least squares of the relative errors, over the runs in which nothing was killed."""
    rows = [row for row in rows if not row.scenario.kills]
    shares = np.array([_shares(*shape_of(row)) for row in rows])
    measured = np.array([row.redis_us for row in rows])
    weights = _non_negative(shares / measured[:, None], np.ones(len(rows)))
    errors = np.abs(shares @ weights / measured - 1)
    idle = [row.idle_redis_ms_s / row.scenario.workers for row in rows if row.scenario.workers > 1]
    call_us, event_us, request_us = map(float, weights)
    return Model(
        call_us=call_us,
        event_us=event_us,
        request_us=request_us,
        idle_ms_s=statistics.median(idle) if idle else 0.0,
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
    )


def shape_of(row: Row) -> tuple[float, float, float]:
    """Streams of a worker in one partition, tokens of an answer, tokens of an event."""
    scenario = row.scenario
    batch = scenario.streams / (scenario.workers * scenario.partitions)
    return batch, scenario.tokens, row.tokens_per_event


def _shares(batch: float, tokens: float, tokens_per_event: float) -> tuple[float, float, float]:
    """Calls, events and requests for each token."""
    calls = 1 / min(batch, limits.MAX_REQUESTS_PER_APPEND) / tokens_per_event
    return calls, 1 / tokens_per_event, 1 / tokens


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative costs: those that would be are set to zero, and the rest is
    fitted again."""
    kept = list(range(matrix.shape[1]))
    while True:
        solution = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        negative = [column for column, value in zip(kept, solution, strict=True) if value < 0]
        if not negative:
            weights = np.zeros(matrix.shape[1])
            weights[kept] = solution
            return weights
        kept = [column for column in kept if column not in negative]
