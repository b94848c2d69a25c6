"""The worker's card: a short-lived key that shows to anybody which workers there are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tokenmill._redis_errors import REDIS_ERRORS
from tokenmill.keys import GROUP, READY_CLASSES, Keyspace
from tokenmill.ready import acreate_groups

from .cancellation import raise_if_cancelled
from .errors import describe
from .logs import fields

logger = logging.getLogger(__name__)

#: A card outlives so many leases without a renewal.
LIFETIME_LEASES = 3
REMOVAL_TIMEOUT_S = 2.0


@dataclass(slots=True, kw_only=True)
class Card:
    """Shows `facts`, and what `state` says at every heartbeat. It is for the eyes only: a card that
    cannot be written is logged and harms nothing.

    The exporter finds cards by the names in the consumer group of resumed work, without walking
    through the keyspace. A worker that loads, or that is full and has lost its name there, reads
    nothing for long, so the card brings the name along.
    """

    redis: Redis
    keys: Keyspace
    worker_id: str
    interval_s: float
    lease_ms: int
    facts: Mapping[str, object]
    state: Callable[[], Mapping[str, object]]
    changed: asyncio.Event  # set when `state` is worth showing before the next heartbeat
    _started: int = field(default_factory=lambda: int(time.time()), init=False)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Keep the card in Redis meanwhile, and remove it at the end."""
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            with contextlib.suppress(TimeoutError, *REDIS_ERRORS):
                key = self.keys.worker_card(self.worker_id)
                await asyncio.wait_for(self.redis.delete(key), REMOVAL_TIMEOUT_S)

    async def _keep(self) -> None:
        while True:
            self.changed.clear()
            try:
                await self._write({**self.facts, "started": self._started, **self.state()})
            except REDIS_ERRORS as error:
                logger.debug("card not written", extra=fields(error=describe(error)))
            raise_if_cancelled()  # before the pause: nobody would wake it up
            with contextlib.suppress(TimeoutError):
                interval_s = self.interval_s * random.uniform(0.8, 1.2)
                await asyncio.wait_for(self.changed.wait(), interval_s)

    async def _write(self, card: Mapping[str, object]) -> None:
        key = self.keys.worker_card(self.worker_id)
        await self.redis.set(key, json.dumps(card), px=LIFETIME_LEASES * self.lease_ms)
        if card["state"] == "draining":  # it is about to take its name out of the groups
            return
        stream = self.keys.ready(READY_CLASSES[0])
        try:
            await self.redis.xgroup_createconsumer(stream, GROUP, self.worker_id)
        except ResponseError as error:
            if "NOGROUP" not in str(error) and "key to exist" not in str(error):
                raise
            await acreate_groups(self.redis, self.keys)  # the first worker of this pool
            await self.redis.xgroup_createconsumer(stream, GROUP, self.worker_id)
