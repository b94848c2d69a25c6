"""Writing events: one `append` under way at a time, everything that came meanwhile in the next.

So batching adapts itself: a fast Redis gets one event per step and request, a slow one gets bigger
events, and no queue grows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from redis.asyncio import Redis

from tokenmill import limits
from tokenmill.calls import AppendEvent, QueueCalls
from tokenmill.replies import LOST, STORED, FinishReply, FinishStatus, events_if_behind
from tokenmill.scripts import arun

from .cancellation import raise_if_cancelled
from .conversion import to_event_fields
from .delivery import Deliveries, Delivery, Ending
from .logs import fields
from .metrics import Metrics
from .retrying import Retrier

logger = logging.getLogger(__name__)

#: End events under way at a time.
FINISHES_AT_A_TIME = 16


class Publisher:
    """Writes what is pending in the deliveries.

    `on_lost` is called for a delivery whose lease is gone, `on_end` for one whose end event is
    stored; both remove it.
    """

    def __init__(
        self,
        redis: Redis,
        calls: QueueCalls,
        deliveries: Deliveries,
        *,
        retrier: Retrier,
        metrics: Metrics,
        text_of: Callable[[int], str],
        on_lost: Callable[[Delivery], None],
        on_end: Callable[[Delivery, Ending], None],
        flush_s: float = 0.0,
    ) -> None:
        self._redis = redis
        self._calls = calls
        self._deliveries = deliveries
        self._retrier = retrier
        self._metrics = metrics
        self._text_of = text_of
        self._on_lost = on_lost
        self._on_end = on_end
        self._flush_s = flush_s
        self._idle = asyncio.Event()

    async def run(self) -> None:
        unwritten = self._deliveries.unwritten
        while True:
            raise_if_cancelled()
            if not unwritten.is_set():
                self._idle.set()
            await unwritten.wait()
            unwritten.clear()
            began_s = time.monotonic()
            await self._append_all()
            await self._finish_all()
            if self._flush_s:
                await asyncio.sleep(max(0.0, began_s + self._flush_s - time.monotonic()))

    async def settle(self) -> None:
        """Wait until everything that was booked is in Redis."""
        self._deliveries.unwritten.set()
        self._idle.clear()
        await self._idle.wait()

    async def _append_all(self) -> None:
        """Everything that the logs are not known to hold, by the numbers of the events."""
        work: list[tuple[Delivery, int]] = []
        arguments: list[str] = []
        for delivery in self._deliveries:
            if delivery.pending:
                for outputs in delivery.take_pending():
                    delivery.add_tokens(*to_event_fields(outputs, self._text_of))
            events, lease = delivery.events, delivery.lease
            for index in range(delivery.acked, len(events)):
                work.append((delivery, index + 1))
                arguments += (lease.request_id, lease.fence, str(index + 1), events[index])
        size = limits.MAX_REQUESTS_PER_APPEND
        for first in range(0, len(work), size):
            part = arguments[4 * first : 4 * (first + size)]
            await self._append(work[first : first + size], part)

    async def _append(self, work: list[tuple[Delivery, int]], arguments: list[str]) -> None:
        call = self._calls.append_packed(arguments)
        began_s = time.monotonic()
        codes = await self._retrier.until_answered("append", lambda: arun(self._redis, call))
        self._metrics.append_seconds.observe(time.monotonic() - began_s)
        for (delivery, seq), code in zip(work, codes, strict=True):
            if code == STORED:  # as nearly always: the others may still be answered meanwhile
                delivery.acknowledge(seq)
            elif delivery in self._deliveries:
                self._book(delivery, seq, code)

    def _book(self, delivery: Delivery, seq: int, code: int) -> None:
        have = events_if_behind(code)
        if code == LOST:
            self._on_lost(delivery)
        elif have is not None:
            self.repair(delivery, have)
        else:
            self._metrics.events_repeated.inc()
            delivery.acknowledge(seq)

    def repair(self, delivery: Delivery, num_events: int) -> None:
        """The log holds only `num_events` events: send the others again."""
        self._metrics.log_repairs.inc()
        logger.warning(
            "log lost its end",
            extra=fields(
                request=delivery.lease.request_id, has=num_events, had=len(delivery.events)
            ),
        )
        delivery.rewind_to(num_events)
        self._deliveries.unwritten.set()

    async def _finish_all(self) -> None:
        ended = [
            (delivery, delivery.ending)
            for delivery in self._deliveries
            if delivery.ending is not None and delivery.is_stored
        ]
        for first in range(0, len(ended), FINISHES_AT_A_TIME):
            part = ended[first : first + FINISHES_AT_A_TIME]
            await asyncio.gather(*(self._finish(*item) for item in part))

    async def _finish(self, delivery: Delivery, ending: Ending) -> None:
        lease = delivery.lease
        call = self._calls.finish(
            AppendEvent(
                lease.request_id, lease.fence, delivery.next_seq, delivery.end_event(ending)
            ),
            state=ending.status,
            usage=delivery.usage.model_dump_json(),
            code=ending.code or "",
            message=ending.message or "",
            facts=delivery.facts(),
        )
        delivery.finishing = True
        reply = await self._retrier.until_answered("finish", partial(arun, self._redis, call))
        delivery.finishing = False
        if delivery in self._deliveries:
            self._conclude(delivery, ending, reply)

    def _conclude(self, delivery: Delivery, ending: Ending, reply: FinishReply) -> None:
        if reply.status is FinishStatus.BEHIND:
            self.repair(delivery, reply.num_events)
        elif reply.status is FinishStatus.LOST or reply.state != ending.status:
            self._on_lost(delivery)  # a repeated call (DUP) may find that it was cancelled
        else:
            self._on_end(delivery, ending)
