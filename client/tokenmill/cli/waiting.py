"""Tells somebody in front of a silent terminal that no worker is there to serve the request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import click

from tokenmill.errors import TokenmillError

from .connection import Connection
from .partitions import partitions
from .snapshot import read_worker_cards

#: Patience before the first look, and between two looks.
LOOK_EVERY_S: Final = 3.0


def _on_stderr(line: str) -> None:
    click.echo(line, err=True)


class WaitingNotice:
    """Until `stop()`: looks for workers now and then, and says once on stderr if none is ready."""

    def __init__(
        self,
        connection: Connection,
        *,
        every_s: float = LOOK_EVERY_S,
        say: Callable[[str], None] = _on_stderr,
    ) -> None:
        self._connection = connection
        self.looks = 0
        self._every_s = every_s
        self._say = say
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def is_watching(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """The request runs, or is over. Does not wait for a look that is under way."""
        self._stopped.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _watch(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                reason = self._reason()
            except TokenmillError:  # the request itself meets and reports them
                continue
            self.looks += 1
            if reason and not self._stopped.is_set():
                self._say(f"tokenmill: the request waits: {reason}")
                return

    def _reason(self) -> str | None:
        """Why nobody serves this pool; None if somebody does."""
        with partitions(self._connection) as homes:
            states = [
                card.get("state")
                for home in homes
                for card in read_worker_cards(home.redis, home.keys)
            ]
        pool = self._connection.pool
        if "ready" in states:
            return None
        if "loading" in states:
            return f"the worker of pool {pool!r} is still loading its model"
        return f"no worker is ready in pool {pool!r}; start one with `tokenmill worker`"
