"""Signs of life: renewing leases, and stopping work that can no longer be proven to be ours."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from tokenmill import limits
from tokenmill._redis_errors import REDIS_ERRORS, is_retryable
from tokenmill.calls import QueueCalls
from tokenmill.replies import LOST
from tokenmill.scripts import arun

from .cancellation import raise_if_cancelled
from .delivery import Deliveries, Delivery
from .health import Loops
from .publisher import Publisher
from .retrying import Retrier

#: Of a lease without a successful renewal, so much passes before the engine is paused. Fencing
#: keeps the log right in any case: this only saves work that would be thrown away.
PAUSE_AFTER_LEASES = 0.8


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """`on_lost` gets each delivery whose lease is gone; `pause` is told whether to stop work."""

    redis: Redis
    calls: QueueCalls
    deliveries: Deliveries
    publisher: Publisher
    retrier: Retrier
    health: Loops
    worker_id: str
    interval_s: float
    lease_s: float
    on_lost: Callable[[Delivery], None]
    pause: Callable[[bool], None]
    _renewed_s: float = field(default_factory=time.monotonic, init=False)

    async def run(self) -> None:
        while True:
            raise_if_cancelled()
            await asyncio.sleep(self.interval_s * random.uniform(0.8, 1.2))
            await self.beat()
            self.pause(time.monotonic() > self._renewed_s + PAUSE_AFTER_LEASES * self.lease_s)

    async def beat(self) -> None:
        """Renew every lease once."""
        sent_s = time.monotonic()
        held = list(self.deliveries)
        try:
            for first in range(0, len(held), limits.MAX_REQUESTS_PER_HEARTBEAT):
                await self._renew(held[first : first + limits.MAX_REQUESTS_PER_HEARTBEAT])
        except REDIS_ERRORS as error:
            if not is_retryable(error):
                raise
            self.retrier.note("heartbeat", error)
            return
        self.retrier.note_success("heartbeat")
        # From the time of sending: when the renewal took effect is not known better than that.
        self._renewed_s = sent_s
        self.health.beaten()

    async def _renew(self, held: Sequence[Delivery]) -> None:
        # The log must hold what was acknowledged when the call was sent; what is acknowledged
        # while it is under way would look like a loss.
        acked = [delivery.acked for delivery in held]
        call = self.calls.heartbeat(self.worker_id, [delivery.lease for delivery in held])
        lengths = await arun(self.redis, call)
        for delivery, length, expected in zip(held, lengths, acked, strict=True):
            # A finish under way ends the lease before its reply is here.
            if delivery not in self.deliveries or delivery.finishing:
                continue
            if length == LOST:
                self.on_lost(delivery)
            elif length < expected:
                self.publisher.repair(delivery, length)
