"""What any worker does for all: `tick` (deadlines, lost workers, retries) and the memory flag."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from tokenmill._backlog import CAPACITY_FIELD
from tokenmill._redis_errors import REDIS_ERRORS, is_retryable
from tokenmill.calls import QueueCalls
from tokenmill.scripts import arun

from .cancellation import raise_if_cancelled
from .logs import fields
from .metrics import TICK_COUNTS, Metrics
from .retrying import Retrier
from .workload import Workload

logger = logging.getLogger(__name__)

MEMORY_INTERVAL_S = 5.0
#: Above this share of maxmemory new requests are refused, so that running ones can end.
MEMORY_HIGH = 0.85
MEMORY_FLAG_MS = 15_000


@dataclass(slots=True, kw_only=True)
class Maintenance:
    redis: Redis
    calls: QueueCalls
    retrier: Retrier
    metrics: Metrics
    workload: Workload
    interval_s: float
    _memory_checked_s: float = field(default=float("-inf"), init=False)

    async def run(self) -> None:
        while True:
            raise_if_cancelled()
            # Far apart at random: of many workers, one call at a time is enough.
            await asyncio.sleep(self.interval_s * random.uniform(0.7, 1.3))
            try:
                await self._tick()
                await self._measure()
                await self._check_memory()
            except REDIS_ERRORS as error:
                if not is_retryable(error):
                    raise
                self.retrier.note("tick", error)
            else:
                self.retrier.note_success("tick")

    async def _tick(self) -> None:
        report = await arun(self.redis, self.calls.tick(jitter=random.random()))
        counts = {name: count for name in TICK_COUNTS if (count := getattr(report, name))}
        for name, count in counts.items():
            self.metrics.maintenance[name].inc(count)
        if counts:
            logger.info("maintenance", extra=fields(**counts))

    async def _measure(self) -> None:
        """Leave behind how fast a worker is: an autoscaler asks while none runs."""
        self.workload.measure()
        capacity = self.workload.capacity_tokens_per_s
        if capacity is not None:
            key = self.calls.keys.maintenance
            await self.redis.hset(key, CAPACITY_FIELD, f"{capacity:.1f}")

    async def _check_memory(self) -> None:
        now_s = time.monotonic()
        if now_s - self._memory_checked_s < MEMORY_INTERVAL_S:
            return
        self._memory_checked_s = now_s
        try:
            memory: Any = await self.redis.info("memory")
        except NoPermissionError:  # without +info the operator's own alarm must do
            self._memory_checked_s = float("inf")
            return
        limit = int(memory.get("maxmemory", 0))
        if limit and int(memory["used_memory"]) > MEMORY_HIGH * limit:
            await self.redis.set(self.calls.keys.memory_flag, "1", px=MEMORY_FLAG_MS)
