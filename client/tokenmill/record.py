"""A request's record in Redis, as `status()` and `result()` need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .errors import ProtocolError
from .protocol import TERMINAL_STATES, State, Usage

#: What to ask for: `HMGET <record> *RECORD_FIELDS`. The body is left out on purpose.
RECORD_FIELDS: Final = (
    "state", "class", "tenant", "created", "not_before", "leased", "ended", "deadline",
    "queue_deadline", "first_token_deadline", "attempts", "handovers", "strikes", "retries",
    "worker", "fingerprint", "end_seq", "usage", "code", "message",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """Times are milliseconds since the epoch, by Redis' clock; None: not yet.

    Deadlines: until the end, the first lease, the first token; None: not asked for, as with
    `not_before_ms`. `attempts` counts leases, `handovers` those of them that a worker gave back for
    another to continue; `strikes` the workers lost in a row without a token; `retries` the errors
    that workers reported. `end_seq` is the number of the end event. `worker` is the last one that
    held a lease.
    """

    state: State
    priority_class: str
    tenant: str
    created_ms: int
    not_before_ms: int | None
    leased_ms: int | None
    ended_ms: int | None
    deadline_ms: int
    queue_deadline_ms: int | None
    first_token_deadline_ms: int | None
    attempts: int
    handovers: int
    strikes: int
    retries: int
    worker: str | None
    fingerprint: str | None
    end_seq: int | None
    usage: Usage | None
    code: str | None
    message: str | None

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES

    @classmethod
    def parse(cls, values: Sequence[str | None]) -> Record | None:
        """The record from the reply to that HMGET, or None: no such request.

        Raises:
            ProtocolError: the hash is not a record.
        """
        given = dict(zip(RECORD_FIELDS, values, strict=True))
        if given["state"] is None:
            return None
        try:
            return cls._from(given)
        except (TypeError, ValueError) as error:
            raise ProtocolError("a request's record does not follow the protocol") from error

    @classmethod
    def _from(cls, given: dict[str, str | None]) -> Record:
        usage = given["usage"]
        return cls(
            state=given["state"],  # type: ignore[arg-type]  # written by our scripts only
            priority_class=given["class"] or "",
            tenant=given["tenant"] or "",
            created_ms=_integer(given["created"]),
            not_before_ms=_optional(given["not_before"]),
            leased_ms=_optional(given["leased"]),
            ended_ms=_optional(given["ended"]),
            deadline_ms=_integer(given["deadline"]),
            queue_deadline_ms=_optional(given["queue_deadline"]),
            first_token_deadline_ms=_optional(given["first_token_deadline"]),
            attempts=_integer(given["attempts"]),
            handovers=_integer(given["handovers"]),
            strikes=_integer(given["strikes"]),
            retries=_integer(given["retries"]),
            worker=given["worker"],
            fingerprint=given["fingerprint"],
            end_seq=_optional(given["end_seq"]),
            usage=None if usage is None else Usage.model_validate_json(usage),
            code=given["code"],
            message=given["message"],
        )


def _integer(value: str | None) -> int:
    if value is None:
        raise ValueError("missing")
    return int(value)


def _optional(value: str | None) -> int | None:
    return None if value is None else int(value)
