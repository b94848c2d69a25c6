"""Where messages wait between the one reader of a client and the consumer of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Protocol

#: Messages kept for a consumer that does not keep up. Beyond, it reads the log instead.
MAX_MESSAGES = 1000


class LiveBuffer:
    """A bounded buffer that forgets everything on overflow, and says so. Not thread-safe."""

    def __init__(self) -> None:
        self._payloads: list[str] = []
        self._missed = False

    def add(self, payload: str) -> None:
        if len(self._payloads) >= MAX_MESSAGES:
            self.miss()
        elif not self._missed:  # the log holds whatever follows a miss, too
            self._payloads.append(payload)

    def miss(self) -> None:
        """Messages may have been missed: what is here is of no use, the log must be read."""
        self._payloads.clear()
        self._missed = True

    def take(self) -> tuple[list[str], bool]:
        """The messages since the last call, and whether some may be missing."""
        taken = self._payloads, self._missed
        self._payloads, self._missed = [], False
        return taken

    @property
    def has_news(self) -> bool:
        return self._missed or bool(self._payloads)


class Subscriber(Protocol):
    """What a listener needs of a mailbox."""

    def put(self, payload: str) -> None: ...

    def miss(self) -> None: ...


class Mailbox:
    """A buffer between two threads."""

    def __init__(self) -> None:
        self._buffer = LiveBuffer()
        self._changed = threading.Condition()

    def put(self, payload: str) -> None:
        with self._changed:
            self._buffer.add(payload)
            self._changed.notify()

    def miss(self) -> None:
        with self._changed:
            self._buffer.miss()
            self._changed.notify()

    def take(self, timeout_s: float) -> tuple[list[str], bool]:
        """As `LiveBuffer.take`, after waiting for news; empty when none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._buffer.has_news, timeout_s)
            return self._buffer.take()


class AsyncMailbox:
    """A buffer between two tasks of one event loop."""

    def __init__(self) -> None:
        self._buffer = LiveBuffer()
        self._changed = asyncio.Event()

    def put(self, payload: str) -> None:
        self._buffer.add(payload)
        self._changed.set()

    def miss(self) -> None:
        self._buffer.miss()
        self._changed.set()

    async def take(self, timeout_s: float) -> tuple[list[str], bool]:
        """As `LiveBuffer.take`, after waiting for news; empty when none came in time."""
        if not self._buffer.has_news:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it may swallow a cancellation.
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        return self._buffer.take()
