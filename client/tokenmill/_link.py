"""A client's way to its queue: calls that are repeated while Redis is away, and the listener."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ._base import (
    FIRST_CONTACT_S,
    HEAD_FIELDS,
    BaseLink,
    ClientOptions,
    accepted,
    log_range,
    parse_read,
)
from ._explain import Explanation, Surroundings, explain
from ._listener import Listener
from ._redis import connect
from ._redis_errors import RetryPolicy, retry
from ._requests import Submission
from ._session import Read, RecordHead
from ._status import Status
from .errors import TokenmillError, UnknownRequest
from .record import RECORD_FIELDS, Record
from .replies import EnqueueReply
from .scripts import run

if TYPE_CHECKING:
    from redis import Redis

T = TypeVar("T")


class Link(BaseLink):
    """Thread-safe. After a fork the child gets connections and a listener of its own."""

    def __init__(self, options: ClientOptions, given: Redis | None) -> None:
        super().__init__(options, given)
        self._redis: Redis = given or connect(options.url, options.redis)
        self._listen()

    def enqueue(self, submission: Submission) -> EnqueueReply:
        """Put a request into the queue; raises when it is refused."""
        call = self._enqueue_call(submission)
        reply = self._call(lambda: run(self._redis, call))
        accepted(submission, reply)
        return reply

    def read(self, request_id: str, action: Read) -> tuple[RecordHead | None, list[str]]:
        """What `action` asks for."""

        def read() -> Any:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hmget(self.keys.record(request_id), list(HEAD_FIELDS))
            pipeline.xrange(self.keys.log(request_id), min=log_range(action), count=action.count)
            return pipeline.execute()

        return parse_read(self._call(read))

    def record(self, request_id: str) -> Record:
        """Raises `UnknownRequest` if there is none."""
        key = self.keys.record(request_id)
        values: Any = self._call(lambda: self._redis.hmget(key, list(RECORD_FIELDS)))
        record = Record.parse(values)
        if record is None:
            raise UnknownRequest(f"no request {request_id}")
        return record

    def explain(self, request_id: str) -> Explanation:
        """Raises `UnknownRequest` if there is no such request."""
        status = Status.of(request_id, self.record(request_id))

        def read() -> Surroundings:
            pipeline = self._redis.pipeline(transaction=False)
            Surroundings.ask(pipeline, self.keys, status)
            replies = pipeline.execute(raise_on_error=False)
            return Surroundings.parse(replies, self.calls.policy.lease_ms)

        return explain(status, self._call(read))

    def cancel(self, request_id: str) -> bool:
        """True if this call ended the request. Raises `UnknownRequest` if there is none."""
        call = self.calls.cancel(request_id)
        reply = self._call(lambda: run(self._redis, call))
        if reply.state is None:
            raise UnknownRequest(f"no request {request_id}")
        return reply.cancelled

    def give_up(self, request_id: str) -> None:
        """Cancel without complaints, and without waiting for a Redis that is away."""
        call = self.calls.cancel(request_id)
        with contextlib.suppress(TokenmillError):
            retry(lambda: run(self._redis, call), RetryPolicy(FIRST_CONTACT_S), self._url)

    def check_usable(self) -> None:
        if self.closed:
            raise RuntimeError("the client is closed")
        if self._pid != os.getpid():
            self._listen()  # forked: threads stay behind, and redis-py renews its connections

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._pid == os.getpid():
            self.listener.close(self.options.timeout_s)
        if self._owns_redis:
            self._redis.close()

    def _call(self, operation: Callable[[], T]) -> T:
        self.check_usable()
        reply = retry(operation, self._retry_policy(), self._url)
        self._reached = True
        return reply

    def _listen(self) -> None:
        self._pid = os.getpid()
        self.listener = Listener(self._redis, self.keys.channel(""))
