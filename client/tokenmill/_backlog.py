"""How much work a pool has, and how fast its workers are: what was read, and what follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from .keys import READY_CLASSES

#: On a worker's card, and in the hash of maintenance as the last worker that knew has written it:
#: tokens that one worker computes per second while there is enough to do.
CAPACITY_FIELD: Final = "capacity_tokens_per_s"


@dataclass(slots=True)
class ClassReading:
    """Of one ready class: entries nobody has read, ids that wait for their tenant's window, entries
    with workers, the lag that Redis itself reports (what it would be, where it reports none), and
    the age of the first undelivered entry."""

    ready: int = 0
    held: int = 0
    pending: int = 0
    lag: int = 0
    oldest_s: float = 0.0

    def add(self, other: ClassReading) -> None:
        self.ready += other.ready
        self.held += other.held
        self.pending += other.pending
        self.lag += other.lag
        self.oldest_s = max(self.oldest_s, other.oldest_s)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Of one server. `max_bytes` is its `maxmemory`; 0: it has no limit."""

    used_bytes: int
    max_bytes: int

    @property
    def fullness(self) -> tuple[float, int]:
        """The larger, the nearer the server is to refusing; without a limit it never does."""
        return (self.used_bytes / self.max_bytes if self.max_bytes else 0.0, self.used_bytes)


@dataclass(slots=True)
class PoolReading:
    """Of all partitions of a pool. Tokens are those of prompts and, at most, of answers.

    `plain` requests came by XADD and are not admitted yet; they count as waiting. `delayed` ones
    are not due yet. `deferred_tokens` are those of waiting requests that no worker may start now,
    however many there were: they are not due, or their partition is paused. `memory` is that of the
    fullest server; None: nobody tells. `cards` are those of the living workers, by id.
    """

    queued: int = 0
    leased: int = 0
    queued_tokens: int = 0
    leased_tokens: int = 0
    plain: int = 0
    plain_tokens: int = 0
    delayed: int = 0
    deferred_tokens: int = 0
    dead_letters: int = 0
    memory_pressure: bool = False
    is_paused: bool = False
    memory: MemoryReading | None = None
    ends_per_s: float = 0.0
    last_speed: float | None = None
    classes: dict[str, ClassReading] = field(
        default_factory=lambda: {name: ClassReading() for name in READY_CLASSES}
    )
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return self.queued + self.plain

    @property
    def waiting_tokens(self) -> int:
        return self.queued_tokens + self.plain_tokens

    @property
    def startable_tokens(self) -> int:
        """Of the waiting ones those that more workers would help with."""
        return max(0, self.waiting_tokens - self.deferred_tokens)

    @property
    def backlog_tokens(self) -> int:
        """The work there is for workers: what waits for one, and what they have."""
        return self.startable_tokens + self.running_tokens

    @property
    def oldest_s(self) -> float:
        """Age of the first request that could be taken now; 0: there is none."""
        return max(reading.oldest_s for reading in self.classes.values())

    @property
    def running_tokens(self) -> int:
        """What is left of what is leased: as the workers' cards say, which may be a heartbeat old,
        and all of it where no card speaks for a request."""
        told = sum(_number(card.get("running")) for card in self.cards.values())
        left = sum(_number(card.get("remaining_tokens")) for card in self.cards.values())
        if told > self.leased:
            left = left * self.leased / told
        elif self.leased:
            left += (self.leased - told) * self.leased_tokens / self.leased
        return round(left)

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of one worker with enough to do; None: no worker has ever known it."""
        told = [_number(card.get(CAPACITY_FIELD)) for card in self.cards.values()]
        measured = [speed for speed in told if speed > 0]
        return sum(measured) / len(measured) if measured else self.last_speed


def _number(value: object) -> float:
    """Of a card, which may be of another release."""
    return float(value) if isinstance(value, int | float) else 0.0
