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

from tokenmill._redis_errors import REDIS_ERRORS

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
    cannot be written is logged and harms nothing."""

    redis: Redis
    key: str
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
                await asyncio.wait_for(self.redis.delete(self.key), REMOVAL_TIMEOUT_S)

    async def _keep(self) -> None:
        while True:
            raise_if_cancelled()
            self.changed.clear()
            card = {**self.facts, "started": self._started, **self.state()}
            try:
                await self.redis.set(self.key, json.dumps(card), px=LIFETIME_LEASES * self.lease_ms)
            except REDIS_ERRORS as error:
                logger.debug("card not written", extra=fields(error=describe(error)))
            with contextlib.suppress(TimeoutError):
                interval_s = self.interval_s * random.uniform(0.8, 1.2)
                await asyncio.wait_for(self.changed.wait(), interval_s)
