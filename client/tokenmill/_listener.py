"""One Pub/Sub connection and one thread for the streams of a `Client` (cluster: of a slot)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from ._mailbox import Mailbox
from ._subscribers import (
    CONNECTION_ERRORS,
    READ_TIMEOUT_S,
    Outage,
    Pulse,
    Subscribers,
    open_pubsub,
)

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)


class Listener:
    """Brings messages to mailboxes; starts with the first subscription. Thread-safe.

    After any error it makes a new connection and subscribes anew, and each confirmation tells the
    mailboxes that messages may be missing. While Redis is away, streams live on reading the log.
    `sharded` channels are those of a cluster.
    """

    def __init__(self, redis: Redis, anchor: str, sharded: bool = False) -> None:
        self._redis = redis
        self._anchor = anchor  # never published to: keeps the connection in subscriber mode
        self._sharded = sharded
        self._lock = threading.Lock()
        self._subscribers = Subscribers(anchor)
        self._left: deque[tuple[str, Mailbox]] = deque()  # mailboxes whose streams are over
        self._pubsub: Any = None  # redis-py's PubSub is untyped; only the thread reads from it
        self._outage = Outage()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def subscribe(self, channel: str, mailbox: Mailbox) -> None:
        with self._lock:
            is_new = self._subscribers.add(channel, mailbox)
            if self._thread is None or not self._thread.is_alive():
                # A daemon: a program that forgets close() must still be able to end.
                self._thread = threading.Thread(
                    target=self._run, name="tokenmill-listener", daemon=True
                )
                self._thread.start()
            elif is_new and self._pubsub is not None:
                with contextlib.suppress(
                    *CONNECTION_ERRORS
                ):  # the reader notices, and subscribes anew
                    self._pubsub.subscribe(channel)

    def unsubscribe(self, channel: str, mailbox: Mailbox) -> None:
        """Never waits: the garbage collector may end a stream in the middle of anything, also
        while this thread holds the lock. Then the reader does it, within a second.
        """
        self.abandon(channel, mailbox)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_left()
            finally:
                self._lock.release()

    def abandon(self, channel: str, mailbox: Mailbox) -> None:
        """`unsubscribe` for the garbage collector: leaves all the work to the reader."""
        self._left.append((channel, mailbox))

    def _drop_left(self) -> None:
        """Give up the channels of the streams that are over. The lock is held."""
        while self._left:
            channel, mailbox = self._left.popleft()
            if self._subscribers.remove(channel, mailbox) and self._pubsub is not None:
                with contextlib.suppress(*CONNECTION_ERRORS):
                    self._pubsub.unsubscribe(channel)

    def close(self, timeout_s: float) -> None:
        """Stop the thread, waiting at most `timeout_s` for one that hangs in the network."""
        self._closing.set()
        with self._lock:
            if self._pubsub is not None:
                with contextlib.suppress(*CONNECTION_ERRORS):
                    self._pubsub.ping()  # its answer wakes the reader
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._lock:
            self._subscribers.wake()  # whoever still reads finds the client closed

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._listen()
            except CONNECTION_ERRORS as error:
                with self._lock:
                    self._subscribers.lost()
                if not self._outage.is_on:
                    logger.warning("no live messages for now (%s)", type(error).__name__)
            self._closing.wait(self._outage.next_pause_s())

    def _listen(self) -> None:
        """Read until an error, or until closed."""
        pubsub = open_pubsub(self._redis, sharded=self._sharded)
        try:
            with self._lock:
                channels = self._subscribers.channels()
            pubsub.subscribe(self._anchor, *channels)  # connects: may take a while
            with self._lock:
                wanted = set(self._subscribers.channels())
                if missing := wanted - set(channels):
                    pubsub.subscribe(*missing)
                if superfluous := set(channels) - wanted:
                    pubsub.unsubscribe(*superfluous)
                self._pubsub = pubsub
            self._read(pubsub)
        finally:
            with self._lock:
                self._pubsub = None
            with contextlib.suppress(*CONNECTION_ERRORS):
                pubsub.close()

    def _read(self, pubsub: Any) -> None:
        pulse = Pulse()
        while not self._closing.is_set():
            message = pubsub.get_message(timeout=READ_TIMEOUT_S)
            if self._left:
                with self._lock:
                    self._drop_left()
            if message is not None:
                pulse.heard()
                self._outage.is_over()
                with self._lock:
                    self._subscribers.dispatch(message)
            elif pulse.must_ping():
                with self._lock:
                    pubsub.ping()
