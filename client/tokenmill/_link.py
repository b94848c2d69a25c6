"""A client's way to its queue: calls that are repeated while Redis is away, and the listener."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ._base import (
    CALLS_AT_A_TIME,
    FIRST_CONTACT_S,
    HEAD_FIELDS,
    BaseLink,
    ClientOptions,
    accepted,
    log_range,
    parse_read,
)
from ._explain import Explanation, explain
from ._inquiry import Question, answers, inquire
from ._listener import Listener
from ._partitions import Partition, Partitions
from ._redis import connect, is_cluster
from ._redis_errors import RetryPolicy, retry
from ._requests import Submission
from ._session import Read, RecordHead
from ._status import Status
from ._tracing import sending
from .errors import QueueUnavailable, TokenmillError, UnknownRequest
from .keys import PARTITIONS_FIELD
from .record import RECORD_FIELDS, Record
from .replies import EnqueueReply
from .scripts import run

if TYPE_CHECKING:
    from redis import Redis

T = TypeVar("T")
Home: TypeAlias = "Partition[Redis, Listener]"


class Link(BaseLink):
    """Thread-safe. After a fork the child gets connections and a listener of its own."""

    def __init__(self, options: ClientOptions, given: Redis | None) -> None:
        super().__init__(options, given)
        self._pid = os.getpid()
        self._turns = threading.BoundedSemaphore(CALLS_AT_A_TIME)
        self._partitions: Partitions[Redis, Listener] = Partitions(
            self.keys,
            self.policy,
            is_cluster=given is None and is_cluster(options.url),
            connect=lambda slot: given or connect(options.url, options.redis, slot=slot),
            listen=Listener,
        )
        self._partitions.client_of(self.keys.slot)  # refuses a wrong URL now

    def home(self, request_id: str) -> Home:
        """The partition that a request lives in."""
        self._count_partitions()
        return self._partitions.home_of(request_id)

    def partitions(self) -> list[Home]:
        """All partitions of the pool."""
        self._count_partitions()
        return self._partitions.all()

    def enqueue(self, submission: Submission) -> EnqueueReply:
        """Put a request into the queue; raises when it is refused."""
        home = self.home(submission.request_id)
        with sending(home.keys, submission.request_id) as trace:
            call = self._enqueue_call(home.calls, submission, trace)
            reply = self._call(lambda: run(home.redis, call))
            accepted(submission, reply)
        return reply

    def read(self, request_id: str, action: Read) -> tuple[RecordHead | None, list[str]]:
        """What `action` asks for."""
        home = self.home(request_id)

        def read() -> Any:
            pipeline = home.redis.pipeline(transaction=False)
            pipeline.hmget(home.keys.record(request_id), list(HEAD_FIELDS))
            pipeline.xrange(home.keys.log(request_id), min=log_range(action), count=action.count)
            return pipeline.execute()

        return parse_read(self._call(read))

    def record(self, request_id: str) -> Record:
        """Raises `UnknownRequest` if there is none."""
        home = self.home(request_id)
        key = home.keys.record(request_id)
        values: Any = self._call(lambda: home.redis.hmget(key, list(RECORD_FIELDS)))
        record = Record.parse(values)
        if record is None:
            raise UnknownRequest(f"no request {request_id}")
        return record

    def explain(self, request_id: str) -> Explanation:
        """Raises `UnknownRequest` if there is no such request."""
        status = Status.of(request_id, self.record(request_id))
        home = self.home(request_id)
        inquiry = inquire(home.keys, status, self.policy.lease_ms)
        questions = next(inquiry)
        while True:
            ask = partial(_ask, home.redis, questions)
            try:
                questions = inquiry.send(self._call(ask))
            except StopIteration as found:
                return explain(status, found.value)

    def cancel(self, request_id: str) -> bool:
        """True if this call ended the request. Raises `UnknownRequest` if there is none."""
        home = self.home(request_id)
        call = home.calls.cancel(request_id)
        reply = self._call(lambda: run(home.redis, call))
        if reply.state is None:
            raise UnknownRequest(f"no request {request_id}")
        return reply.cancelled

    def give_up(self, request_id: str) -> None:
        """Cancel without complaints, and without waiting for a Redis that is away."""
        home = self._partitions.home_of(request_id)
        call = home.calls.cancel(request_id)
        with contextlib.suppress(TokenmillError):
            self._repeat(lambda: run(home.redis, call), RetryPolicy(FIRST_CONTACT_S))

    def check_usable(self) -> None:
        if self.closed:
            raise RuntimeError("the client is closed")
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._turns = threading.BoundedSemaphore(CALLS_AT_A_TIME)
            self._partitions.forget_listeners()  # forked; redis-py renews its connections

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._pid == os.getpid():
            for listener in self._partitions.listeners():
                listener.close(self.options.timeout_s)
        if self._owns_redis:
            for client in self._partitions.clients():
                client.close()

    def _call(self, operation: Callable[[], T]) -> T:
        self.check_usable()
        policy = self._retry_policy(self._partitions.clients())
        try:
            reply = self._repeat(operation, policy)
        except QueueUnavailable:
            longer = self._retry_policy(self._partitions.clients())
            if longer == policy:
                raise
            reply = self._repeat(operation, longer)
        self._reached = True
        return reply

    def _repeat(self, operation: Callable[[], T], policy: RetryPolicy) -> T:
        def in_turn() -> T:
            with self._turns:
                return operation()

        return retry(in_turn, policy, self._url)

    def _count_partitions(self) -> None:
        """Until a worker has said how many there are, every call asks again."""
        self.check_usable()
        if not self._partitions.is_counted:
            redis = self._partitions.client_of(self.keys.meta_slot)
            field: Any = self._call(lambda: redis.hget(self.keys.meta, PARTITIONS_FIELD))
            self._partitions.learn(field)


def _ask(redis: Redis, questions: list[Question]) -> list[Any]:
    """All in one round trip."""
    pipeline = redis.pipeline(transaction=False)
    for question in questions:
        question(pipeline)
    return answers(pipeline.execute(raise_on_error=False))
