"""Giving back what waits here for room while a peer has it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tokenmill._redis_errors import REDIS_ERRORS, is_retryable
from tokenmill.keys import GROUP, Keyspace
from tokenmill_engine.outputs import WaitingRequest

from .cancellation import raise_if_cancelled
from .delivery import Deliveries, Delivery
from .handover import Handover
from .logs import fields
from .retrying import Retrier

logger = logging.getLogger(__name__)

#: Looks in the time after which a request goes back.
LOOKS = 4


@dataclass(slots=True, kw_only=True)
class GiveBack:
    """`waiting` are the engine's waiting requests in queue order; `size_of` is the expected size of
    one in tokens. `on_given_back` is called after each."""

    redis: Redis
    keys: Keyspace
    deliveries: Deliveries
    handover: Handover
    retrier: Retrier
    worker_id: str
    after_s: float
    waiting: Callable[[], tuple[WaitingRequest, ...]]
    size_of: Callable[[Delivery], int]
    on_given_back: Callable[[Delivery], None]
    _since_s: dict[str, float] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        while True:
            raise_if_cancelled()
            await asyncio.sleep(self.after_s / LOOKS)
            due = self._due()
            if not due:
                continue
            try:
                await self._give_back(due)
            except REDIS_ERRORS as error:
                if not is_retryable(error):
                    raise
                self.retrier.note("give_back", error)
            else:
                self.retrier.note_success("give_back")

    def _due(self) -> list[Delivery]:
        """Those that have waited for too long, in the order of the engine's queue."""
        now_s = time.monotonic()
        names = [one.request_id for one in self.waiting()]
        self._since_s = {name: self._since_s.get(name, now_s) for name in names}
        overdue = (self.deliveries.get(n) for n in names if now_s - self._since_s[n] > self.after_s)
        # What is not stored yet would be lost; what has its end will be gone in a moment.
        return [d for d in overdue if d is not None and d.is_stored and d.ending is None]

    async def _give_back(self, due: list[Delivery]) -> None:
        rooms = await self._rooms_of_peers()
        for delivery in due:
            needed = self.size_of(delivery)
            peer = max(rooms, key=rooms.__getitem__, default="")
            if not peer or rooms[peer] < needed:
                continue  # perhaps a smaller one fits
            rooms[peer] -= needed
            if delivery in self.deliveries:
                self.on_given_back(delivery)
                await self.handover.give_back(delivery)
                logger.info(
                    "no room",
                    extra=fields(request=delivery.lease.request_id, tokens=needed, peer=peer),
                )

    async def _rooms_of_peers(self) -> dict[str, int]:
        """Worker → tokens, of the ready workers that show room on their cards."""
        try:
            found: Any = await self.redis.xinfo_consumers(self.keys.ready("1"), GROUP)
        except ResponseError as error:
            if is_retryable(error):
                raise
            return {}  # Redis lost its data, and with it the group
        peers = [one["name"] for one in found if one["name"] != self.worker_id]
        async with self.redis.pipeline(transaction=False) as pipeline:
            for peer in peers:
                pipeline.get(self.keys.worker_card(peer))
            cards: Any = await pipeline.execute()
        rooms = {peer: _room(card) for peer, card in zip(peers, cards, strict=True)}
        return {peer: room for peer, room in rooms.items() if room}


def _room(card: str | None) -> int:
    """Other versions of this program write cards too, so nothing is taken for granted."""
    facts: Any = json.loads(card) if card else {}
    if not isinstance(facts, Mapping) or facts.get("state") != "ready":
        return 0
    room = facts.get("room_tokens")
    return room if isinstance(room, int) else 0
