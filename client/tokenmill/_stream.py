"""A request's answer as it comes."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ._mailbox import Mailbox
from ._session import Read, Wait
from ._stream_base import StreamBase, StreamPlan
from ._tracing import RequestSpan
from .errors import ConfigurationError, UnknownRequest
from .protocol import Completion, Event

if TYPE_CHECKING:
    from ._link import Home, Link


class TokenStream(StreamBase):
    """Iterate it for text deltas, or `events()` for everything; `completion()` is the whole.

    In a `with` block, leaving early cancels a request that this stream submitted (unless it was
    made with `cancel_on_exit=False`); a stream from `attach` only stops listening. Without a block
    the iteration itself is the block. A stream that is forgotten inside its block, or whose client
    is closed, stops listening, and its request goes on. For one consumer.
    """

    def __init__(self, link: Link, plan: StreamPlan) -> None:
        super().__init__(plan)
        self._link = link
        self._mailbox: Mailbox | None = None
        self._home: Home | None = None
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        self._managed = True
        self._open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._managed = False
        self.close()

    def __iter__(self) -> Iterator[str]:
        return self._texts()

    def events(self) -> Generator[Event, None, None]:
        """Every event, each once and in order, with rewinds. Does not raise `RequestFailed`."""
        self._open()
        try:
            while True:
                while self._pending:
                    yield self._next_pending()
                action = self._state.next_action()
                if action is None:
                    break
                self._pending.extend(self._perform(action))
        finally:
            if self.finished or not self._managed:
                self.close()

    def completion(self) -> Completion:
        """Wait for the end, and return everything that was generated.

        Raises:
            RequestFailed: it ended otherwise than done; carries what there is.
            ResultTimeout: a time limit was given and is over.
        """
        with closing(self.events()) as events:
            for _ in events:
                pass
        return self._outcome()

    def cancel(self) -> bool:
        """End the request. True if this call did it; the end event follows."""
        return self._link.cancel(self.id)

    def close(self) -> None:
        """Stop listening; cancel the request if this stream submitted it and it did not end."""
        if self._pid != os.getpid():
            return  # a fork's copy: listening and cancelling are the parent's
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None and self._home is not None:
            self._left_in_order()
            self._home.listener.unsubscribe(self._home.keys.channel(self.id), mailbox)
        if self._must_cancel and not self._link.closed:
            self._owned = False
            self._link.give_up(self.id)
        self._span.close()

    def _texts(self) -> Generator[str, None, None]:
        with closing(self.events()) as events:
            for event in events:
                text = self._text(event)
                if text:
                    yield text
        self._outcome()

    def _open(self) -> None:
        if self._mailbox is not None or self.finished:
            return
        home = self._home = self._link.home(self.id)
        self._start_clock()
        mailbox, channel = Mailbox(), home.keys.channel(self.id)
        self._mailbox = mailbox
        self._free_when_forgotten(home.listener.abandon, channel, mailbox)
        submission = None if self._enqueued else self._plan.submission
        try:
            # First listen, then enqueue: what comes before the confirmation is in the log.
            home.listener.subscribe(channel, mailbox)
            if submission is None:
                self._state.catch_up()  # there may be something to read: do not wait to be told
                return
            self._span = RequestSpan.start(self.id, submission.body)
            with self._span.active():
                reply = self._link.enqueue(submission)
        except BaseException as error:
            self._interrupted(submission, error)
            self.close()
            raise
        self._accepted(reply, is_private=submission.is_private)

    def _perform(self, action: Read | Wait) -> list[Event]:
        if self._pid != os.getpid():
            raise ConfigurationError(
                "a stream belongs to the process that made it; use attach(id, after=last_seq) here"
            )
        assert self._mailbox is not None
        if isinstance(action, Wait):
            payloads, missed = self._mailbox.take(self._patience_s(action.seconds))
            if missed:
                self._state.catch_up()
            return self._state.on_messages(payloads)
        self._mailbox.take(0)
        head, payloads = self._link.read(self.id, action)
        try:
            return self._state.on_read(head, payloads, action)
        except UnknownRequest:
            submission = self._plan.submission
            if submission is None or not self._link.options.resubmit:
                raise
        reply = self._link.enqueue(submission)
        return self._state.recreated(reply.created_ms)
