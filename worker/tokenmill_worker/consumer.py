"""Reading the ready streams and taking leases, never more than there is capacity for."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.asyncio import Redis

from tokenmill._redis_errors import REDIS_ERRORS, is_retryable
from tokenmill.calls import QueueCalls
from tokenmill.keys import GROUP
from tokenmill.ready import acreate_groups, read_entries
from tokenmill.replies import AdmitStatus, LeaseCode, ReadyEntry
from tokenmill.scripts import arun

from .cancellation import raise_if_cancelled
from .delivery import Deliveries, Delivery
from .health import Health
from .intake import Identity
from .logs import fields
from .metrics import Metrics
from .retrying import Retrier
from .settings import BLOCK_MS

logger = logging.getLogger(__name__)

#: Normal priority is looked at before low with this probability: low never starves.
NORMAL_FIRST = 0.8
#: The own pending entries are read in pages of this many.
PENDING_PAGE = 500


@dataclass(slots=True, kw_only=True)
class Consumer:
    """`capacity` says how many more requests fit; `on_lease` gets each new delivery."""

    redis: Redis
    calls: QueueCalls
    deliveries: Deliveries
    identity: Identity
    capacity: Callable[[], int]
    on_lease: Callable[[Delivery], None]
    retrier: Retrier
    metrics: Metrics
    health: Health
    _stopping: bool = field(default=False, init=False)

    def stop(self) -> None:
        """Read no more; `run` returns when what was read is leased, after at most one BLOCK."""
        self._stopping = True
        self.deliveries.changed.set()

    async def run(self) -> None:
        pauses = self.retrier.pauses()
        while not self._stopping:
            raise_if_cancelled()
            try:
                await acreate_groups(self.redis, self.calls.keys)
                await self._take_own_pending()
                self.retrier.note_success("fetch")
                pauses = self.retrier.pauses()
                while not self._stopping:
                    await self._fetch()
            except REDIS_ERRORS as error:
                # NOGROUP: Redis has lost its data, and with it the groups.
                if not is_retryable(error) and "NOGROUP" not in str(error):
                    raise
                self.retrier.note("fetch", error)
                await asyncio.sleep(next(pauses))

    async def _take_own_pending(self) -> None:
        """Entries that were given to this worker in a reply that never arrived."""
        known = {(d.lease.ready_class, d.lease.entry_id) for d in self.deliveries}
        for ready_class, stream in self.calls.keys.ready_streams.items():
            last = "0"
            while True:
                entries = await self._read({stream: last}, count=PENDING_PAGE)
                await self._take([e for e in entries if (ready_class, e.entry_id) not in known])
                if len(entries) < PENDING_PAGE:
                    break
                last = entries[-1].entry_id

    async def _fetch(self) -> None:
        """One pass over the classes in their order; if nothing was there, wait for anything."""
        await self._wait_for_capacity()
        found = False
        for ready_class in _class_order():
            free = self.capacity()
            if free <= 0 or self._stopping:
                return
            entries = await self._read({self.calls.keys.ready(ready_class): ">"}, count=free)
            found = found or bool(entries)
            await self._take(entries)
        if not found and not self._stopping:
            streams = dict.fromkeys(self.calls.keys.ready_streams.values(), ">")
            await self._take(await self._read(streams, count=1, block_ms=BLOCK_MS))

    async def _wait_for_capacity(self) -> None:
        raise_if_cancelled()
        while self.capacity() <= 0 and not self._stopping:
            self.health.is_full = True
            self.deliveries.changed.clear()
            await self.deliveries.changed.wait()
        self.health.is_full = False

    async def _read(
        self, streams: dict[str, str], *, count: int, block_ms: int | None = None
    ) -> list[ReadyEntry]:
        reply = await self.redis.xreadgroup(
            GROUP,
            self.identity.worker_id,
            streams,  # type: ignore[arg-type]  # redis-py's dict type is invariant
            count=count,
            block=block_ms,
        )
        self.health.fetched()
        return read_entries(self.calls.keys, reply)

    async def _take(self, entries: list[ReadyEntry]) -> None:
        """Lease entries just read. Repeating a call gives the same leases, so it is repeated."""
        entries = [entry for entry in entries if await self._admit(entry)]
        if not entries:
            return
        call = self.calls.lease(
            self.identity.worker_id, entries, fingerprint=self.identity.fingerprint
        )
        replies = await self.retrier.until_answered("lease", lambda: arun(self.redis, call))
        for reply in replies:
            if reply.code is not LeaseCode.OK or reply.lease is None:
                self.metrics.entries_dropped.inc()
                continue
            delivery = Delivery(reply.lease)
            if self.deliveries.get(delivery.attempt_id) is None:
                self.on_lease(delivery)

    async def _admit(self, entry: ReadyEntry) -> bool:
        """Make the record of an entry that came by plain XADD."""
        if entry.body is None:
            return True
        call = self.calls.admit(entry)
        status = await self.retrier.until_answered("admit", lambda: arun(self.redis, call))
        if status is not AdmitStatus.OK:
            self.metrics.entries_dropped.inc()
            logger.warning("plain entry refused", extra=fields(entry=entry.entry_id, why=status))
        return status is AdmitStatus.OK


def _class_order() -> tuple[str, ...]:
    return ("r", "0", "1", "2") if random.random() < NORMAL_FIRST else ("r", "0", "2", "1")
