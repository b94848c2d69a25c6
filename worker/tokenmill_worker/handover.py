"""Giving requests back: all of them when the worker drains or has failed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tokenmill._redis_errors import is_retryable
from tokenmill.calls import QueueCalls
from tokenmill.keys import GROUP
from tokenmill.replies import ReleaseReply
from tokenmill.scripts import ScriptCall, arun

from .delivery import Deliveries, Delivery
from .logs import fields
from .metrics import Metrics
from .retrying import Retrier

logger = logging.getLogger(__name__)

#: Releases under way at a time.
RELEASES_AT_A_TIME = 16


@dataclass(slots=True, kw_only=True)
class Handover:
    redis: Redis
    calls: QueueCalls
    deliveries: Deliveries
    retrier: Retrier
    metrics: Metrics
    worker_id: str
    retry_backoff_ms: int
    on_released: Callable[[Delivery], None] = lambda _delivery: None

    async def hand_over_all(self) -> None:
        """For peers to continue at once."""
        await self._release_all(self._hand_over)

    async def give_back(self, delivery: Delivery) -> None:
        """One that cannot start here, for a peer that has room."""
        await self._release(delivery, self._hand_over(delivery, "no_room"))

    async def give_up_all(self) -> None:
        """After a failure. Progress tells the innocent: who stored a token in this attempt is
        handed over, who did not may be the cause, and comes back later and only so many times.
        """
        await self._release_all(self._give_up)

    def _hand_over(
        self, delivery: Delivery, reason: Literal["drain", "no_room"] = "drain"
    ) -> ScriptCall[ReleaseReply]:
        lease = delivery.lease
        return self.calls.hand_over(
            lease.request_id, lease.fence, reason=reason, facts=delivery.facts()
        )

    def _give_up(self, delivery: Delivery) -> ScriptCall[ReleaseReply]:
        lease = delivery.lease
        if delivery.made_progress:
            return self._hand_over(delivery)
        return self.calls.retry_later(
            lease.request_id,
            lease.fence,
            delay_ms=int(self.retry_backoff_ms * random.uniform(0.5, 1.5)),
            message="the worker failed while it had this request",
            facts=delivery.facts(),
        )

    async def _release_all(self, call_for: Callable[[Delivery], ScriptCall[ReleaseReply]]) -> None:
        while held := list(self.deliveries)[:RELEASES_AT_A_TIME]:
            await asyncio.gather(
                *(self._release(delivery, call_for(delivery)) for delivery in held)
            )

    async def _release(self, delivery: Delivery, call: ScriptCall[ReleaseReply]) -> None:
        if delivery not in self.deliveries:  # it ended meanwhile
            return
        # Out of the books first: what the engine still brings must not be written any more.
        self.deliveries.remove(delivery)
        self.metrics.wasted_tokens.inc(delivery.num_unstored_tokens)
        reply = await self.retrier.until_answered("release", lambda: arun(self.redis, call))
        self.metrics.released.inc()
        self.on_released(delivery)
        logger.info(
            "request released",
            extra=fields(**delivery.ids, reply=reply.status.value),
        )

    async def leave_groups(self) -> None:
        """Take the worker's name out of the consumer groups.

        With entries pending the name stays, because deleting it would destroy them.
        """
        for stream in self.calls.keys.ready_streams.values():
            await self.retrier.until_answered("release", self._leaver(stream))

    def _leaver(self, stream: str) -> Callable[[], Awaitable[None]]:
        async def leave() -> None:
            try:
                consumers = await self.redis.xinfo_consumers(stream, GROUP)
            except ResponseError as error:
                if is_retryable(error):
                    raise
                return  # Redis lost its data: there is no group to leave
            mine = [c for c in consumers if c["name"] == self.worker_id]
            if mine and not mine[0]["pending"]:
                await self.redis.xgroup_delconsumer(stream, GROUP, self.worker_id)

        return leave
