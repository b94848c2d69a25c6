"""Whether the worker works, for the probes and for its card."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

State = Literal["loading", "ready", "draining"]


@dataclass(slots=True)
class Loops:
    """The loops of one lane. Written by the event loop, read by other threads. Times are monotonic,
    in seconds."""

    stale_after_s: float  # without a sign of life for so long, a loop counts as stuck
    is_full: bool = False  # the consumer waits for capacity, so it has no reason to fetch
    last_fetch_s: float = field(default_factory=time.monotonic)
    last_heartbeat_s: float = field(default_factory=time.monotonic)

    def fetched(self) -> None:
        self.last_fetch_s = time.monotonic()

    def beaten(self) -> None:
        self.last_heartbeat_s = time.monotonic()

    @property
    def stuck(self) -> list[str]:
        """Loops that have not had an answer from Redis for too long."""
        now_s = time.monotonic()
        stuck = []
        if not self.is_full and now_s - self.last_fetch_s > self.stale_after_s:
            stuck.append("fetch")
        if now_s - self.last_heartbeat_s > self.stale_after_s:
            stuck.append("heartbeat")
        return stuck


@dataclass(slots=True)
class Health:
    """Of the whole worker. `lanes` are by partition; there are none before it serves.

    `engine_busy_s` is the age of the engine's present call: steps must follow one another while
    there is work.
    """

    stale_after_s: float
    state: State = "loading"
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    lanes: dict[int, Loops] = field(default_factory=dict)
    engine_busy_s: Callable[[], float] = lambda: 0.0
    engine_stale_after_s: float = float("inf")

    def enter(self, state: State) -> None:
        self.state = state
        self.changed.set()

    def lane(self, partition: int) -> Loops:
        return self.lanes.setdefault(partition, Loops(self.stale_after_s))

    def watch_engine(self, busy_s: Callable[[], float], stale_after_s: float) -> None:
        """From now on a call of the engine that is older makes the worker unready."""
        self.engine_busy_s, self.engine_stale_after_s = busy_s, stale_after_s

    @property
    def is_engine_stuck(self) -> bool:
        return self.engine_busy_s() > self.engine_stale_after_s

    @property
    def is_ready(self) -> bool:
        """Whether it serves: with several partitions, one that can be reached is enough."""
        if self.state != "ready" or self.is_engine_stuck:
            return False
        return any(not loops.stuck for loops in self.lanes.values())

    @property
    def stuck_loops(self) -> list[str]:
        """The engine, and of all lanes; with more than one, each with its partition."""
        stuck = ["engine"] if self.is_engine_stuck else []
        for number, loops in self.lanes.items():
            suffix = f".{number}" if len(self.lanes) > 1 else ""
            stuck += [f"{loop}{suffix}" for loop in loops.stuck]
        return stuck
