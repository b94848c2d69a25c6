"""Reading the ready streams and taking leases, never more than there is room for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from redis.asyncio import Redis

from tokenmill._redis_errors import REDIS_ERRORS, is_retryable
from tokenmill.calls import QueueCalls
from tokenmill.keys import GROUP
from tokenmill.ready import acreate_groups, read_entries
from tokenmill.replies import AdmitStatus, Lease, LeaseCode, ReadyEntry
from tokenmill.scripts import arun

from .cancellation import raise_if_cancelled
from .delivery import Deliveries, Delivery
from .health import Loops
from .intake import Identity
from .logs import fields
from .metrics import Metrics
from .places import Places
from .retrying import Retrier
from .service_order import RESUMED, plan_reads
from .settings import BLOCK_MS

logger = logging.getLogger(__name__)

#: Entries of each class that are looked at before the order of reading is decided.
PEEK_ENTRIES = 8
#: The own pending entries are read in pages of this many.
PENDING_PAGE = 500


@dataclass(slots=True, kw_only=True)
class Consumer:
    """`places` says how many more requests fit; `on_lease` gets each new delivery.

    While requests come, each round asks for the ages of what waits (`peek`) and reads in the order
    of service. When there was nothing, one read blocks on all classes at once. While the queue is
    paused, it asks now and then whether it still is.
    """

    redis: Redis
    calls: QueueCalls
    deliveries: Deliveries
    identity: Identity
    places: Places
    aging_ms: int
    on_lease: Callable[[Delivery], None]
    retrier: Retrier
    metrics: Metrics
    health: Loops
    _stopping: bool = field(default=False, init=False)
    _is_idle: bool = field(default=False, init=False)
    _no_resumed_until_s: float = field(default=float("-inf"), init=False)

    def stop(self) -> None:
        """Read no more; `run` returns when what was read is leased, after at most one BLOCK."""
        self._stopping = True
        self.deliveries.changed.set()

    def leave_resumed(self, duration_s: float) -> None:
        """Leave resumed work to the peers for so long: some of it was just given to them."""
        self._no_resumed_until_s = time.monotonic() + duration_s

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
        await self._wait_for_capacity()
        if self._stopping:
            return
        if self._is_idle:
            await self._wait_for_work()
        else:
            await self._take_in_order()

    async def _take_in_order(self) -> None:
        seen = await arun(self.redis, self.calls.peek(PEEK_ENTRIES))
        self.health.fetched()
        if seen.is_paused:
            await asyncio.sleep(BLOCK_MS / 1000)
            return
        ages_ms = {name: seen.ages_ms[name] for name in self._classes()}
        plan = plan_reads(ages_ms, count=self.places.num_free(), aging_ms=self.aging_ms)
        self._is_idle = not any(ages_ms.values())
        for ready_class, planned in plan.items():
            count = min(planned, self.places.num_free())
            if count <= 0 or self._stopping:
                return
            with self.places.reserved(count):
                await self._take(
                    await self._read({self.calls.keys.ready(ready_class): ">"}, count=count)
                )

    async def _wait_for_work(self) -> None:
        """One read of whatever comes first.

        COUNT is per stream, so it may bring one entry of each class, and more than there is room
        for: the rest is given back at once.
        """
        streams = {self.calls.keys.ready(name): ">" for name in self._classes()}
        entries = await self._read(streams, count=1, block_ms=BLOCK_MS)
        self._is_idle = not entries
        room = max(self.places.num_free(), 0)
        with self.places.reserved(min(room, len(entries))):
            await self._take(entries[:room])
        for lease in await self._lease(entries[room:]):
            self.metrics.leases.inc()
            call = self.calls.hand_over(lease.request_id, lease.fence, reason="no_room")
            await self.retrier.until_answered("release", partial(arun, self.redis, call))

    def _classes(self) -> Iterable[str]:
        leave_resumed = time.monotonic() < self._no_resumed_until_s
        return (
            name
            for name in self.calls.keys.ready_streams
            if not (leave_resumed and name == RESUMED)
        )

    async def _wait_for_capacity(self) -> None:
        raise_if_cancelled()
        while self.places.num_free() <= 0 and not self._stopping:
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
        for lease in await self._lease(entries):
            delivery = Delivery(lease)
            if self.deliveries.get(delivery.attempt_id) is None:
                self.on_lease(delivery)

    async def _lease(self, entries: list[ReadyEntry]) -> list[Lease]:
        """Lease entries just read. Repeating a call gives the same leases, so it is repeated."""
        entries = [entry for entry in entries if await self._admit(entry)]
        if not entries:
            return []
        call = self.calls.lease(
            self.identity.worker_id, entries, fingerprint=self.identity.fingerprint
        )
        replies = await self.retrier.until_answered("lease", lambda: arun(self.redis, call))
        leases = [r.lease for r in replies if r.code is LeaseCode.OK and r.lease is not None]
        put_back = sum(reply.code is LeaseCode.PAUSED for reply in replies)
        self.metrics.entries_dropped.inc(len(replies) - len(leases) - put_back)
        return leases

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
