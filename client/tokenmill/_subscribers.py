"""Who listens to which channel: the part of a listener that knows no Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from ._mailbox import Subscriber
from ._redis_errors import REDIS_ERRORS, RetryPolicy

#: What using a connection may raise. redis-py trips over its own closed socket when a connection
#: is dropped while another thread or task is about to use it: AttributeError and ValueError; and
#: asyncio refuses two readers of one connection with a RuntimeError.
CONNECTION_ERRORS = (*REDIS_ERRORS, AttributeError, ValueError, RuntimeError)
#: What PubSub calls its messages, for ordinary and for sharded channels.
_MESSAGE = ("message", "smessage")
_SUBSCRIBED = ("subscribe", "ssubscribe")
_UNSUBSCRIBED = ("unsubscribe", "sunsubscribe")
#: A silent connection is looked after this often.
READ_TIMEOUT_S = 1.0
#: Nothing heard for this long: ask whether the connection still lives.
PING_AFTER_S = 10.0
PONG_WITHIN_S = 5.0


class ShardedPubSub:
    """redis-py's PubSub, sync or asyncio, with the sharded commands under the plain names."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub = pubsub
        self.subscribe = pubsub.ssubscribe
        self.unsubscribe = pubsub.sunsubscribe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pubsub, name)


def open_pubsub(redis: Any, *, sharded: bool) -> Any:
    """A PubSub of a sync or asyncio client; all of it is untyped in redis-py.

    It does not reconnect by itself: redis-py would, in whichever thread or task meets the error
    first, while another one reads from the same connection.
    """
    pubsub: Any = redis.pubsub()
    pubsub._reconnect = lambda connection, *_, **__: connection.disconnect()
    return ShardedPubSub(pubsub) if sharded else pubsub


class Subscribers:
    """Channel → mailboxes, and which channels the server has confirmed.

    `anchor` is a channel that is never given up.
    """

    def __init__(self, anchor: str) -> None:
        self._anchor = anchor
        self._mailboxes: dict[str, list[Subscriber]] = {}
        self._confirmed: set[str] = set()

    def add(self, channel: str, mailbox: Subscriber) -> bool:
        """True if the channel is new and has to be subscribed to."""
        if channel in self._confirmed:
            mailbox.miss()  # it came late: the log holds what it missed
        boxes = self._mailboxes.setdefault(channel, [])
        boxes.append(mailbox)
        return len(boxes) == 1

    def remove(self, channel: str, mailbox: Subscriber) -> bool:
        """True if nobody listens any more and the channel has to be given up."""
        boxes = self._mailboxes.get(channel, [])
        if mailbox in boxes:
            boxes.remove(mailbox)
        if boxes or channel not in self._mailboxes:
            return False
        del self._mailboxes[channel]
        self._confirmed.discard(channel)
        return True

    def channels(self) -> list[str]:
        return list(self._mailboxes)

    def lost(self) -> None:
        """The connection is gone, and every confirmation with it."""
        self._confirmed.clear()

    def wake(self) -> None:
        """Let every consumer look for itself."""
        for boxes in self._mailboxes.values():
            for mailbox in boxes:
                mailbox.miss()

    def dispatch(self, message: dict[str, Any]) -> None:
        """Raises `ConnectionError` if another server has the channels by now."""
        kind, channel = message["type"], message["channel"]
        if kind in _MESSAGE:
            for mailbox in self._mailboxes.get(channel, ()):
                mailbox.put(message["data"])
        elif kind in _SUBSCRIBED and channel in self._mailboxes:
            # From here on nothing is missed; what came before is in the log.
            self._confirmed.add(channel)
            for mailbox in self._mailboxes[channel]:
                mailbox.miss()
        elif kind in _UNSUBSCRIBED and channel == self._anchor:
            raise RedisConnectionError("the slot has moved to another server")


class Pulse:
    """Notices a connection that is dead without saying so."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at = clock()
        self._asked_at: float | None = None

    def heard(self) -> None:
        self._heard_at = self._clock()
        self._asked_at = None

    def must_ping(self) -> bool:
        """Whether to send a PING now. Raises if the last one got no answer in time."""
        now = self._clock()
        if self._asked_at is not None:
            if now - self._asked_at > PONG_WITHIN_S:
                raise RedisConnectionError("the connection does not answer")
            return False
        if now - self._heard_at <= PING_AFTER_S:
            return False
        self._asked_at = now
        return True


class Outage:
    """How long to wait before the next try, and whether this outage was reported already."""

    def __init__(self) -> None:
        self.is_over()

    def is_over(self) -> None:
        self.is_on = False
        self._pauses = RetryPolicy().pauses()

    def next_pause_s(self) -> float:
        self.is_on = True
        return next(self._pauses)
