"""What the scripts answer, as frozen dataclasses; each class knows how to read its reply.

Replies have RESP2's shape (lists, integers, text): see the header of each file in `lua/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from .keys import READY_CLASSES

#: Codes of `append`, one per event; a code below LOST is read with `events_if_behind`.
STORED: Final = 1
STORED_BEFORE: Final = 0
LOST: Final = -1
#: Bounds of what a refusal says about when to try again.
MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 60.0
RETRY_AFTER_UNKNOWN_S: Final = 2.0


def events_if_behind(code: int) -> int | None:
    """For an `append` code: how many events the log holds if it lost its end, else None."""
    return -2 - code if code < LOST else None


class EnqueueStatus(StrEnum):
    OK = "OK"
    DUP = "DUP"
    CONFLICT = "CONFLICT"
    FULL = "FULL"
    TENANT_FULL = "TENANT_FULL"
    TOO_LARGE = "TOO_LARGE"


@dataclass(frozen=True, slots=True)
class EnqueueReply:
    """`created_ms` and `state` belong to OK, DUP and CONFLICT; `reason` ("memory", "queue" or
    "tenant"), `queued` and `rate` to FULL and TENANT_FULL: what waits, and how many requests end
    per second (None: not known yet)."""

    status: EnqueueStatus
    created_ms: int = 0
    state: str = ""
    reason: str = ""
    queued: int = 0
    rate: float | None = None

    @property
    def retry_after_s(self) -> float:
        """When what waits now is likely to have ended."""
        if self.rate is None:
            return RETRY_AFTER_UNKNOWN_S
        if self.queued >= self.rate * MAX_RETRY_AFTER_S:
            return MAX_RETRY_AFTER_S
        return max(MIN_RETRY_AFTER_S, self.queued / self.rate)

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> EnqueueReply:
        status = EnqueueStatus(reply[0])
        if status in (EnqueueStatus.FULL, EnqueueStatus.TENANT_FULL):
            rate = float(reply[3]) if reply[3] else None
            return cls(status, reason=reply[1], queued=reply[2], rate=rate)
        if status is EnqueueStatus.TOO_LARGE:
            return cls(status)
        return cls(status, created_ms=reply[1], state=reply[2])


class AdmitStatus(StrEnum):
    """Unless OK, the entry is gone; TOO_LARGE and FULL have ended with an end event."""

    OK = "OK"
    DUP = "DUP"
    CONFLICT = "CONFLICT"
    INVALID = "INVALID"
    TOO_LARGE = "TOO_LARGE"
    FULL = "FULL"

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> AdmitStatus:
        return cls(reply[0])


@dataclass(frozen=True, slots=True)
class ReadyEntry:
    """An entry as read from a ready stream. `body` is set on a plain XADD: admit it first."""

    ready_class: str
    entry_id: str
    request_id: str
    body: str | None = None
    tenant: str = ""
    traceparent: str = ""
    tracestate: str = ""


class LeaseCode(StrEnum):
    OK = "OK"
    GONE = "GONE"
    BUSY = "BUSY"
    EXPIRED = "EXPIRED"
    PAUSED = "PAUSED"


@dataclass(frozen=True, slots=True)
class PeekReply:
    """By ready class, the ages in ms of the first entries nobody has read, oldest first; and
    whether an operator has paused the queue."""

    ages_ms: dict[str, list[int]]
    is_paused: bool

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> PeekReply:
        *ages_ms, paused = reply
        return cls(dict(zip(READY_CLASSES, ages_ms, strict=True)), bool(paused))


class MoveCode(StrEnum):
    """Of one request; UNKNOWN also when its retention is over."""

    MOVED = "MOVED"
    SAME = "SAME"
    TAKEN = "TAKEN"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a request until its fence is void. Times are by Redis' clock.

    `attempt` counts the request's leases from 1. `fence` names this lease and is handed back with
    every write; what it consists of is the scripts' affair. `num_events` is the length of the
    event log: above 0, an earlier attempt got so far. `fingerprint` is that of the model that
    started the request. `traceparent` and `tracestate` (W3C) name the trace it belongs to.
    """

    request_id: str
    ready_class: str
    entry_id: str
    attempt: int
    fence: str
    num_events: int
    remaining_ms: int
    waited_ms: int
    strikes: int
    tenant: str
    fingerprint: str
    body: str
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """`lease` is set exactly when the code is OK; with any other code, forget the entry."""

    code: LeaseCode
    entry: ReadyEntry
    lease: Lease | None = None

    @classmethod
    def parse(cls, entry: ReadyEntry, reply: Sequence[Any]) -> LeaseReply:
        code = LeaseCode(reply[0])
        if code is not LeaseCode.OK:
            return cls(code, entry)
        where = (entry.request_id, entry.ready_class, entry.entry_id)
        return cls(code, entry, Lease(*where, *reply[1:]))


class FinishStatus(StrEnum):
    OK = "OK"
    DUP = "DUP"
    LOST = "LOST"
    BEHIND = "BEHIND"


@dataclass(frozen=True, slots=True)
class FinishReply:
    """`num_events` belongs to BEHIND: append the events after it, then finish again."""

    status: FinishStatus
    state: str = ""
    num_events: int = 0

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> FinishReply:
        status = FinishStatus(reply[0])
        if status is FinishStatus.BEHIND:
            return cls(status, num_events=reply[1])
        return cls(status, state=reply[1])


class ReleaseStatus(StrEnum):
    OK = "OK"
    FAILED = "FAILED"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """`state` after the call: queued or delayed; failed when no retry was left."""

    status: ReleaseStatus
    state: str

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> ReleaseReply:
        return cls(ReleaseStatus(reply[0]), reply[1])


@dataclass(frozen=True, slots=True)
class CancelReply:
    """`cancelled`: this call ended it. `state` is None when there is no such request."""

    cancelled: bool
    state: str | None

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> CancelReply:
        return cls(bool(reply[0]), reply[1] or None)


class RequeueStatus(StrEnum):
    OK = "OK"
    NO_BODY = "NO_BODY"
    NOT_DEAD = "NOT_DEAD"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class RequeueReply:
    """`state` after the call; a repeated call finds NOT_DEAD. Without a body (it was not kept, or
    not for so long) a dead request stays dead; UNKNOWN: its retention is over."""

    status: RequeueStatus
    created_ms: int
    state: str

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> RequeueReply:
        return cls(RequeueStatus(reply[0]), reply[1], reply[2])


@dataclass(frozen=True, slots=True)
class TenantShare:
    """One tenant's weight and how many of its requests wait."""

    tenant: str
    weight: int
    queued: int

    @classmethod
    def parse_all(cls, reply: Sequence[Any]) -> list[TenantShare]:
        rows = zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        return sorted((cls(*row) for row in rows), key=lambda share: share.tenant)


@dataclass(frozen=True, slots=True)
class TickReport:
    """How many requests one round of maintenance moved; `in_grace`: lost workers were not
    looked for, because nobody had ticked for a while."""

    promoted: int
    expired: int
    vanished: int
    redelivered: int
    requeued: int
    dead: int
    recovered: int
    consumers: int
    in_grace: bool

    @classmethod
    def parse(cls, reply: str) -> TickReport:
        counts = json.loads(reply)
        return cls(**{**counts, "in_grace": bool(counts["in_grace"])})
