"""One request's stream as a state machine without I/O: lossless over lossy Pub/Sub.

The event log in Redis is the truth; Pub/Sub only brings its entries sooner. `StreamState` says what
to do next (`next_action`) and is told what came of it (`on_messages`, `on_read`); the sync
and the async client are two loops around it. A lost message, a slow reader, a cut connection, a
late subscriber and a resumed stream are one case: the numbers do not connect, read the log.

If Redis lost data, the log is shorter than, or differs from, what was delivered. It is then read
from the start, compared, and what no longer stands is withdrawn by a `RewindEvent`. A log that
contradicts itself is a `ProtocolError`: re-reading is bounded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import limits
from ._accumulator import Accumulator
from ._events import WireEvent, parse_numbered
from ._reading import LogReading, LogRewritten
from .errors import ProtocolError, UnknownRequest
from .protocol import EndEvent, Event, TokenEvent

#: Nothing new for this long: look into the log. Grows while nothing happens.
POLL_FIRST_S = 1.0
POLL_MOST_S = 5.0
POLL_GROWTH = 1.5
POLL_JITTER = 0.2
#: Re-reads of a log without a new token before it is called broken.
MAX_SUSPICIONS = 3


@dataclass(frozen=True, slots=True)
class Read:
    """Read the head of the record, then up to `count` entries of the log after number `after`.

    In this order: a log read after a record with an end holds that end. Messages that arrived
    before are of no use, the log holds them: drop them first. The last entry read before is read
    again: if it changed, the log was rewritten.
    """

    after: int
    count: int = limits.REPLAY_PAGE


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for messages, at most `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The record fields that tell whether the log is still the one read so far."""

    created_ms: int
    end_seq: int | None

    @classmethod
    def parse(cls, created: str | bytes | None, end: str | bytes | None) -> RecordHead | None:
        """From the record's fields `created` and `end_seq`; None if there is no record."""
        return None if created is None else cls(int(created), int(end) if end else None)


@dataclass(slots=True)
class StreamStats:
    """What the network and Redis did to one stream."""

    gaps: int = 0
    duplicates: int = 0
    reads: int = 0
    restarts: int = 0


class StreamState:
    """Everything known about one request's stream; driven by one consumer.

    `after` is the number of the last event that the caller saw in an earlier life. The log is read
    from its start all the same, silently up to there: so the completion is whole, and what follows
    can be checked.
    """

    def __init__(
        self,
        request_id: str,
        after: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.delivered = Accumulator(request_id)
        self.stats = StreamStats()
        self._starts: set[tuple[int, int]] = set()
        self._reading = LogReading(self.delivered, self._starts)
        self._last = 0  # number of the last event read, and its JSON
        self._last_payload: str | bytes = ""
        self._skip_through = after
        self._created_ms: int | None = None
        self._must_read = False
        self._polling = False
        self._suspicions = 0
        self._clock = clock
        self._poll_s = POLL_FIRST_S
        self._rest()

    @property
    def finished(self) -> bool:
        return self.delivered.end is not None

    def next_action(self) -> Read | Wait | None:
        """What to do now; None once the end event was delivered."""
        if self.finished:
            return None
        wait_s = self._poll_at - self._clock()
        if wait_s <= 0 and not self._must_read:
            self._must_read = self._polling = True
        return Read(max(0, self._last - 1)) if self._must_read else Wait(wait_s)

    def catch_up(self) -> None:
        """Messages may be missing (a new subscription, an overflow): read the log next."""
        self._must_read = True

    def enqueued(self, created_ms: int) -> None:
        """The queue took the request; a record with another birth is another request."""
        self._created_ms = created_ms

    def recreated(self, created_ms: int | None) -> list[Event]:
        """The request was enqueued anew under its id: read its log from the start."""
        self._created_ms = created_ms
        self._starts.clear()
        return self._restart(suspect=False)

    def on_messages(self, payloads: Sequence[str | bytes]) -> list[Event]:
        """Take messages in order of arrival; returns what to deliver."""
        out: list[Event] = []
        for payload in payloads:
            out += self._take_message(payload)
            if self._must_read or self.finished:
                break
        return out

    def on_read(
        self, head: RecordHead | None, payloads: Sequence[str | bytes], action: Read
    ) -> list[Event]:
        """Take what `action` asked for; returns what to deliver.

        Raises `UnknownRequest` if there is no record, `ProtocolError` if the log makes no sense.
        """
        self.stats.reads += 1
        if head is None:
            raise UnknownRequest(
                f"no request {self.request_id}: the id is wrong, or its retention is over"
            )
        if self._created_ms not in {None, head.created_ms}:
            return self.recreated(head.created_ms)
        self._created_ms = head.created_ms
        new = payloads
        if self._last:
            if list(payloads[:1]) != [self._last_payload]:
                return self._restart()
            new = payloads[1:]
        try:
            out = self._take_page(new)
        except LogRewritten:
            return self._restart()
        if self.finished or len(payloads) < action.count:
            out += self._reached_the_end_of_the_log(head, anything=bool(new))
        return out

    def _take_page(self, payloads: Sequence[str | bytes]) -> list[Event]:
        out: list[Event] = []
        for payload in payloads:
            out += self._accept(payload, *parse_numbered(payload))
            if self.finished:
                break
        return out

    def _reached_the_end_of_the_log(self, head: RecordHead, *, anything: bool) -> list[Event]:
        if head.end_seq is not None and not self.finished:
            return self._restart()  # rewritten shorter, or the end was lost
        self._rest(grow=self._polling and not anything)
        self._must_read = self._polling = False
        return self._check_cursor()

    def _take_message(self, payload: str | bytes) -> list[Event]:
        try:
            seq, event = parse_numbered(payload)
            if seq <= self._last:
                return self._take_duplicate(payload, seq, event)
            if seq > self._last + 1:
                self.stats.gaps += 1
                return self._read_instead()
            if isinstance(event, EndEvent) and event.attempt != self._reading.attempt:
                # Ended by Redis before that attempt spoke, or the log was rewritten: look.
                return self._read_instead()
            out = self._accept(payload, seq, event)
        except ProtocolError:  # only the log can be wrong; a strange message is merely not used
            return self._read_instead()
        except LogRewritten:
            return self._restart()
        self._rest()
        return out + self._check_cursor() if self.finished else out

    def _take_duplicate(
        self, payload: str | bytes, seq: int, event: WireEvent | None
    ) -> list[Event]:
        self.stats.duplicates += 1
        if seq == self._last:
            rewritten = payload != self._last_payload
        else:
            rewritten = self._reading.contradicts(event)
        # Each message restarts at most once, so this cannot loop and is no reason for suspicion.
        return self._restart(suspect=False) if rewritten else []

    def _read_instead(self) -> list[Event]:
        self._must_read = True
        return []

    def _accept(self, payload: str | bytes, seq: int, event: WireEvent | None) -> list[Event]:
        if seq != self._last + 1:
            raise LogRewritten
        out = self._reading.accept(event) if event is not None else []
        self._last, self._last_payload = seq, payload
        if any(isinstance(item, TokenEvent) for item in out):
            self._suspicions = 0
        return out if seq > self._skip_through else []

    def _restart(self, *, suspect: bool = True) -> list[Event]:
        if suspect:
            self._suspect("its log contradicts itself")
        out = self._check_cursor()
        self.stats.restarts += 1
        self._reading = LogReading(self.delivered, self._starts)
        self._last = self._skip_through = 0
        self._must_read, self._polling = True, False
        return out

    def _check_cursor(self) -> list[Event]:
        """If the log ends below the caller's cursor, that cursor is from a log now lost."""
        if self._last >= self._skip_through:
            return []
        self._skip_through = 0
        return self.delivered.replay(self._last)

    def _suspect(self, reason: str) -> None:
        self._suspicions += 1
        if self._suspicions > MAX_SUSPICIONS:
            raise ProtocolError(f"request {self.request_id}: {reason}")

    def _rest(self, *, grow: bool = False) -> None:
        """Wait again before polling, longer each time nothing came."""
        self._poll_s = min(POLL_MOST_S, self._poll_s * POLL_GROWTH) if grow else POLL_FIRST_S
        jitter = random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)
        self._poll_at = self._clock() + self._poll_s * jitter
