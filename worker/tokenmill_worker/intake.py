"""From a lease to the engine: read what was published before, validate, tokenize, submit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redis.asyncio import Redis

from tokenmill import limits
from tokenmill.keys import Keyspace

from .conversion import EngineRequest, Published, failure, to_engine_request
from .delivery import Deliveries, Delivery
from .dispatcher import Dispatcher
from .engine_port import Engine
from .engine_thread import EngineThread
from .resume import fold_log
from .retrying import Retrier

#: Logs read at a time, each on a connection of its own: a peer's death brings many at once.
LOGS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is and what it serves."""

    worker_id: str
    model_names: Sequence[str]  # names that a request's `model` may have
    fingerprint: str  # of the model: tells whether a resumed request began with the same
    resume_any_model: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    redis: Redis
    keys: Keyspace
    deliveries: Deliveries
    dispatcher: Dispatcher
    engine: Engine
    engine_thread: EngineThread
    retrier: Retrier
    identity: Identity
    #: Held by the one suspect that may begin: lanes of a worker share it.
    quarantine: asyncio.Lock = field(default_factory=asyncio.Lock)
    _turns: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(LOGS_AT_A_TIME), init=False
    )

    async def admit(self, delivery: Delivery) -> None:
        """Bring a held delivery into the engine, or let it end with an error of its own."""
        events = await self._read_log(delivery) if delivery.lease.num_events else []
        request: EngineRequest | None = None
        try:
            published = fold_log(events)
            delivery.restore(events, len(published.token_ids))
            if self._model_changed(delivery):
                ending = failure("model_changed", "the model differs from the first one")
                self.dispatcher.end(delivery, ending)
            else:
                # Tokenizing a long prompt takes long enough to delay the heartbeat.
                request = await asyncio.to_thread(self._convert, delivery, published)
        except Exception as error:  # noqa: BLE001 - whatever one request does ends only that one
            delivery.restore(events, delivery.num_tokens)
            self.dispatcher.refuse(delivery, error)
        if request is None:
            return
        delivery.meta = request.meta
        delivery.prompt_tokens = len(request.prompt_token_ids)
        delivery.max_tokens = request.params.max_tokens
        if delivery.lease.strikes:
            async with self.quarantine:
                await self._begin_alone(delivery, request)
        elif self._announce(delivery):
            self.engine_thread.submit(request)

    def _announce(self, delivery: Delivery) -> bool:
        """The start event; False: cancelled, expired or handed over meanwhile."""
        if delivery not in self.deliveries:
            return False
        delivery.times.submitted_s = time.monotonic()
        delivery.start(self.identity.worker_id)
        self.deliveries.unwritten.set()
        return True

    async def _begin_alone(self, delivery: Delivery, request: EngineRequest) -> None:
        """Returns when the suspect has a token in its log, or is gone.

        Its start event is stored before the engine sees it: should it take the process along,
        that event tells it from the suspects that never got so far (see `reclaim` in tick).
        """
        if not self._announce(delivery):
            return
        stored = delivery.stored = asyncio.Event()
        await self._until(lambda: delivery.is_stored, delivery, stored)
        if delivery in self.deliveries:
            self.engine_thread.submit(request)
        await self._until(lambda: delivery.made_progress, delivery, stored)

    async def _until(
        self, condition: Callable[[], bool], delivery: Delivery, stored: asyncio.Event
    ) -> None:
        while delivery in self.deliveries and not condition():
            stored.clear()
            await stored.wait()

    def _convert(self, delivery: Delivery, published: Published) -> EngineRequest:
        return to_engine_request(delivery, published, self.engine, self.identity.model_names)

    def _model_changed(self, delivery: Delivery) -> bool:
        first = delivery.lease.fingerprint
        changed = bool(first) and first != self.identity.fingerprint
        return changed and delivery.acked > 0 and not self.identity.resume_any_model

    async def _read_log(self, delivery: Delivery) -> list[str]:
        """The JSON of every event in the log, in order."""
        key = self.keys.log(delivery.lease.request_id)
        events: list[str] = []
        while True:
            after = f"({len(events)}-0"
            read = partial(self.redis.xrange, key, min=after, count=limits.REPLAY_PAGE)
            async with self._turns:
                page: Any = await self.retrier.until_answered("log", read)
            events += [fields.get("d", "") for _, fields in page]
            if len(page) < limits.REPLAY_PAGE:
                return events
