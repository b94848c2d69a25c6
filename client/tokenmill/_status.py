"""Where a request stands, as `status()` reports it, and what `submit()` returns."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from .keys import PRIORITIES
from .protocol import TERMINAL_STATES, State, Usage
from .record import Record

_PRIORITY_OF_CLASS = {ready_class: name for name, ready_class in PRIORITIES.items()}


class Status(BaseModel):
    """A request's record. Times are by the clock of Redis; None: not yet, or not asked for.

    `deadline_at` is that of the end, the others are those of the first lease and the first token.
    `attempts` counts workers that took the request, `handovers` those of them that gave it back for
    another to continue; `strikes` those lost in a row without a token; `retries` errors that
    workers reported. `worker` is the last one.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    state: State
    priority: str
    tenant: str
    created_at: datetime
    not_before_at: datetime | None
    leased_at: datetime | None
    ended_at: datetime | None
    deadline_at: datetime
    queue_deadline_at: datetime | None
    first_token_deadline_at: datetime | None
    attempts: int
    handovers: int
    strikes: int
    retries: int
    worker: str | None
    usage: Usage | None
    code: str | None
    message: str | None

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES

    @classmethod
    def of(cls, request_id: str, record: Record) -> Status:
        return cls(
            id=request_id,
            state=record.state,
            priority=_PRIORITY_OF_CLASS.get(record.priority_class, record.priority_class),
            tenant=record.tenant,
            created_at=_time(record.created_ms),
            not_before_at=_optional_time(record.not_before_ms),
            leased_at=_optional_time(record.leased_ms),
            ended_at=_optional_time(record.ended_ms),
            deadline_at=_time(record.deadline_ms),
            queue_deadline_at=_optional_time(record.queue_deadline_ms),
            first_token_deadline_at=_optional_time(record.first_token_deadline_ms),
            attempts=record.attempts,
            handovers=record.handovers,
            strikes=record.strikes,
            retries=record.retries,
            worker=record.worker,
            usage=record.usage,
            code=record.code,
            message=record.message,
        )


@dataclass(frozen=True, slots=True)
class Handle:
    """A request in the queue. `is_new` is False if the very same one had been submitted before."""

    id: str
    is_new: bool = True


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, tz=UTC)


def _optional_time(ms: int | None) -> datetime | None:
    return None if ms is None else _time(ms)
