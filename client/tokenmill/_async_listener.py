"""One Pub/Sub connection and one task for the streams of an `AsyncClient` (cluster: of a slot)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from ._cancellation import keep_cancellation
from ._mailbox import AsyncMailbox
from ._subscribers import (
    CONNECTION_ERRORS,
    READ_TIMEOUT_S,
    Outage,
    Pulse,
    Subscribers,
    open_pubsub,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)


class AsyncListener:
    """Brings messages to mailboxes; starts with the first subscription.

    After any error it makes a new connection and subscribes anew, and each confirmation tells the
    mailboxes that messages may be missing. While Redis is away, streams live on reading the log.
    `sharded` channels are those of a cluster.
    """

    def __init__(self, redis: Redis, anchor: str, sharded: bool = False) -> None:
        self._redis = redis
        self._anchor = anchor  # never published to: keeps the connection in subscriber mode
        self._sharded = sharded
        self._subscribers = Subscribers(anchor)
        self._left: deque[tuple[str, AsyncMailbox]] = deque()  # mailboxes whose streams are over
        self._pubsub: Any = None  # redis-py's PubSub is untyped
        self._sending = asyncio.Lock()
        self._outage = Outage()
        self._task: asyncio.Task[None] | None = None

    async def subscribe(self, channel: str, mailbox: AsyncMailbox) -> None:
        is_new = self._subscribers.add(channel, mailbox)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="tokenmill-listener")
        elif is_new:
            await self._send("subscribe", channel)

    async def unsubscribe(self, channel: str, mailbox: AsyncMailbox) -> None:
        """Cancelled in the middle, it leaves the rest to the reader."""
        self.abandon(channel, mailbox)
        await self._drop_left()

    def abandon(self, channel: str, mailbox: AsyncMailbox) -> None:
        """`unsubscribe` for the garbage collector: leaves all the work to the reader."""
        self._left.append((channel, mailbox))

    async def aclose(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            while not task.done():
                # Again and again: see keep_cancellation.
                task.cancel()
                await asyncio.wait([task], timeout=0.05)
        self._subscribers.wake()  # whoever still reads finds the client closed

    async def _send(self, command: str, *channels: str) -> None:
        """One command at a time, in the order of the calls, and none on a closed connection."""
        async with self._sending:
            await self._send_now(command, *channels)

    async def _send_now(self, command: str, *channels: str) -> None:
        if self._pubsub is not None:
            # The reader meets the same trouble, and subscribes anew.
            with contextlib.suppress(*CONNECTION_ERRORS):
                await keep_cancellation(getattr(self._pubsub, command)(*channels))

    async def _drop_left(self) -> None:
        """Give up the channels of the streams that are over."""
        async with self._sending:
            while self._left:
                channel, mailbox = self._left.popleft()
                if self._subscribers.remove(channel, mailbox):
                    await self._send_now("unsubscribe", channel)

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except CONNECTION_ERRORS as error:
                self._subscribers.lost()
                if not self._outage.is_on:
                    logger.warning("no live messages for now (%s)", type(error).__name__)
            await asyncio.sleep(self._outage.next_pause_s())

    async def _listen(self) -> None:
        """Read until an error."""
        pubsub = open_pubsub(self._redis, sharded=self._sharded)
        try:
            channels = self._subscribers.channels()
            await pubsub.subscribe(self._anchor, *channels)
            async with self._sending:
                self._pubsub = pubsub
                wanted = set(self._subscribers.channels())
                if missing := wanted - set(channels):
                    await self._send_now("subscribe", *missing)
                if superfluous := set(channels) - wanted:
                    await self._send_now("unsubscribe", *superfluous)
            await self._read(pubsub)
        finally:
            self._pubsub = None
            async with self._sending:
                with contextlib.suppress(*CONNECTION_ERRORS):
                    await pubsub.aclose()

    async def _read(self, pubsub: Any) -> None:
        pulse = Pulse()
        while True:
            message = await pubsub.get_message(timeout=READ_TIMEOUT_S)
            if self._left:
                await self._drop_left()
            if message is not None:
                pulse.heard()
                self._outage.is_over()
                self._subscribers.dispatch(message)
            elif pulse.must_ping():
                await self._send("ping")
