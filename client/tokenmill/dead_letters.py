"""Dead letters: requests that were given up, and why. The body stays in the request's record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry of the stream `Keyspace.dead_letters`.

    `why` is the code with which the request ended; `worker` the last one that had it. The request
    may have been queued again under its id since, or its record may be gone.
    """

    entry_id: str
    request_id: str
    tenant: str
    why: str
    attempts: int
    worker: str

    @property
    def died_ms(self) -> int:
        """Milliseconds since the epoch, by the clock of Redis."""
        return int(self.entry_id.partition("-")[0])

    @classmethod
    def parse_all(cls, entries: Iterable[tuple[str, Mapping[str, str]]]) -> list[DeadLetter]:
        """From the reply to XRANGE or XREVRANGE."""
        return [
            cls(
                entry_id=entry_id,
                request_id=fields["id"],
                tenant=fields["tenant"],
                why=fields["why"],
                attempts=int(fields["attempts"]),
                worker=fields["worker"],
            )
            for entry_id, fields in entries
        ]
