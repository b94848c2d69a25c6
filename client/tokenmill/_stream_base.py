"""What `TokenStream` and `AsyncTokenStream` have in common. No I/O."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ._requests import Submission
from ._session import StreamState
from ._tracing import NO_SPAN
from .errors import ResultTimeout, StreamDiverged, failure
from .protocol import Completion, EndEvent, Event, RewindEvent, TokenEvent
from .replies import EnqueueReply, EnqueueStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """What a stream is for: a new request (`submission`), or one that is there already.

    `timeout_s` bounds the whole stream; None waits as long as the request lives. Without
    `cancel_on_exit`, leaving early only stops listening.
    """

    request_id: str
    after: int = 0
    submission: Submission | None = None
    timeout_s: float | None = None
    cancel_on_exit: bool = True


class StreamBase:
    """One request's stream for one consumer."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._state = StreamState(plan.request_id, plan.after)
        self._pending: deque[Event] = deque()
        self._span = NO_SPAN
        self._last_seq = plan.after
        self._enqueued = False
        self._owned = False  # this stream put the request into the queue
        self._managed = False  # inside a `with` block, which decides when it is over
        self._give_up_at: float | None = None
        self._forgotten: weakref.finalize[..., StreamBase] | None = None

    @property
    def id(self) -> str:
        return self._plan.request_id

    @property
    def last_seq(self) -> int:
        """Number of the last event handed out: `attach(id, after=last_seq)` continues behind it."""
        return self._last_seq

    def _next_pending(self) -> Event:
        """Hand out an event that was read; the state may be far ahead of it."""
        event = self._pending.popleft()
        if not isinstance(event, RewindEvent):
            self._last_seq = event.seq
        self._span.saw(event)
        return event

    @property
    def finished(self) -> bool:
        """Whether the end event was read."""
        return self._state.finished

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} at event {self.last_seq}>"

    @property
    def _must_cancel(self) -> bool:
        """Whether to end the request when nobody reads on."""
        return self._owned and self._plan.cancel_on_exit and not self.finished

    def _free_when_forgotten(self, abandon: Callable[..., None], *arguments: object) -> None:
        """A stream that is never closed is at least not listened for. Its request goes on: the
        garbage collector is no place for a conversation with Redis."""
        self._forgotten = weakref.finalize(self, abandon, *arguments)
        self._forgotten.atexit = False

    def _left_in_order(self) -> None:
        if self._forgotten is not None:
            self._forgotten.detach()

    def _interrupted(self, submission: Submission | None, error: BaseException) -> None:
        """While it was being sent the request was interrupted, and may be in the queue."""
        self._span.failed(error)
        if submission is not None:
            self._owned = submission.is_private and not isinstance(error, Exception)

    def _accepted(self, reply: EnqueueReply, *, is_private: bool) -> None:
        self._enqueued = True
        # DUP of a private id is our own call repeated after a lost reply. Otherwise the request
        # was somebody else's first, and stays when we leave.
        self._owned = is_private or reply.status is EnqueueStatus.OK
        self._state.enqueued(reply.created_ms)

    def _start_clock(self) -> None:
        if self._plan.timeout_s is not None and self._give_up_at is None:
            self._give_up_at = time.monotonic() + self._plan.timeout_s

    def _patience_s(self, wait_s: float) -> float:
        """How long to wait, at most `wait_s`. Raises `ResultTimeout` when the time is over."""
        if self._give_up_at is None:
            return wait_s
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise ResultTimeout(
                f"request {self.id}: no end within {self._plan.timeout_s:g} s; "
                "it goes on (is a worker running?)"
            )
        return min(wait_s, left_s)

    def _outcome(self) -> Completion:
        """The completion of a finished stream; raises `RequestFailed` if it did not end well."""
        completion, end = self._state.delivered.completion(), self._state.delivered.end
        if end is None or end.status == "done":
            return completion
        code, message = end.code or "internal", end.message or "no reason was given"
        raise failure(self.id, end.status, code, message, completion)

    def _text(self, event: Event) -> str:
        """The text of one event; raises `StreamDiverged` where text handed out is withdrawn."""
        if isinstance(event, RewindEvent):
            raise StreamDiverged(self.id, event.index)
        return event.text if isinstance(event, TokenEvent | EndEvent) else ""
