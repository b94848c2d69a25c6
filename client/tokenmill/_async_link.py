"""A client's asyncio way to its queue: repeats calls while Redis is away, and listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ._async_listener import AsyncListener
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
from ._cancellation import keep_cancellation
from ._explain import Explanation, explain
from ._inquiry import Question, answers, inquire
from ._partitions import Partition, Partitions
from ._redis import aconnect, is_cluster
from ._redis_errors import RetryPolicy, aretry
from ._requests import Submission
from ._session import Read, RecordHead
from ._status import Status
from ._tracing import sending
from .errors import ConfigurationError, QueueUnavailable, TokenmillError, UnknownRequest
from .keys import PARTITIONS_FIELD
from .record import RECORD_FIELDS, Record
from .replies import EnqueueReply
from .scripts import arun

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")
AsyncHome: TypeAlias = "Partition[Redis, AsyncListener]"


class AsyncLink(BaseLink):
    """Belongs to one event loop."""

    def __init__(self, options: ClientOptions, given: Redis | None) -> None:
        super().__init__(options, given)
        self._turns = asyncio.BoundedSemaphore(CALLS_AT_A_TIME)
        self._partitions: Partitions[Redis, AsyncListener] = Partitions(
            self.keys,
            self.policy,
            is_cluster=given is None and is_cluster(options.url),
            connect=lambda slot: given or aconnect(options.url, options.redis, slot=slot),
            listen=AsyncListener,
        )
        self._partitions.client_of(self.keys.slot)  # refuses a wrong URL now
        self._loop: asyncio.AbstractEventLoop | None = None

    async def home(self, request_id: str) -> AsyncHome:
        """The partition that a request lives in."""
        await self._count_partitions()
        return self._partitions.home_of(request_id)

    async def partitions(self) -> list[AsyncHome]:
        """All partitions of the pool."""
        await self._count_partitions()
        return self._partitions.all()

    async def enqueue(self, submission: Submission) -> EnqueueReply:
        """Put a request into the queue; raises when it is refused."""
        home = await self.home(submission.request_id)
        with sending(home.keys, submission.request_id) as trace:
            call = self._enqueue_call(home.calls, submission, trace)
            reply = await self._call(lambda: arun(home.redis, call))
            accepted(submission, reply)
        return reply

    async def read(self, request_id: str, action: Read) -> tuple[RecordHead | None, list[str]]:
        """What `action` asks for."""
        home = await self.home(request_id)

        async def read() -> Any:
            pipeline = home.redis.pipeline(transaction=False)
            pipeline.hmget(home.keys.record(request_id), list(HEAD_FIELDS))
            pipeline.xrange(home.keys.log(request_id), min=log_range(action), count=action.count)
            return await pipeline.execute()

        return parse_read(await self._call(read))

    async def record(self, request_id: str) -> Record:
        """Raises `UnknownRequest` if there is none."""
        home = await self.home(request_id)
        key = home.keys.record(request_id)
        values: Any = await self._call(lambda: home.redis.hmget(key, list(RECORD_FIELDS)))
        record = Record.parse(values)
        if record is None:
            raise UnknownRequest(f"no request {request_id}")
        return record

    async def explain(self, request_id: str) -> Explanation:
        """Raises `UnknownRequest` if there is no such request."""
        status = Status.of(request_id, await self.record(request_id))
        home = await self.home(request_id)
        inquiry = inquire(home.keys, status, self.policy.lease_ms)
        questions = next(inquiry)
        while True:
            ask = partial(_ask, home.redis, questions)
            try:
                questions = inquiry.send(await self._call(ask))
            except StopIteration as found:
                return explain(status, found.value)

    async def cancel(self, request_id: str) -> bool:
        """True if this call ended the request. Raises `UnknownRequest` if there is none."""
        home = await self.home(request_id)
        call = home.calls.cancel(request_id)
        reply = await self._call(lambda: arun(home.redis, call))
        if reply.state is None:
            raise UnknownRequest(f"no request {request_id}")
        return reply.cancelled

    async def give_up(self, request_id: str) -> None:
        """Cancel without complaints, and without waiting for a Redis that is away."""
        home = self._partitions.home_of(request_id)
        call = home.calls.cancel(request_id)
        with contextlib.suppress(TokenmillError):
            await self._repeat(lambda: arun(home.redis, call), RetryPolicy(FIRST_CONTACT_S))

    def check_usable(self) -> None:
        if self.closed:
            raise RuntimeError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConfigurationError(
                "an AsyncClient belongs to the event loop that used it first; make one per loop"
            )

    async def aclose(self) -> None:
        if self.closed:
            return
        self.closed = True
        for listener in self._partitions.listeners():
            await listener.aclose()
        if self._owns_redis:
            for client in self._partitions.clients():
                await client.aclose()

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T:
        self.check_usable()
        policy = self._retry_policy(self._partitions.clients())
        try:
            reply = await keep_cancellation(self._repeat(operation, policy))
        except QueueUnavailable:
            longer = self._retry_policy(self._partitions.clients())
            if longer == policy:
                raise
            reply = await keep_cancellation(self._repeat(operation, longer))
        self._reached = True
        return reply

    async def _repeat(self, operation: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
        async def in_turn() -> T:
            async with self._turns:
                return await operation()

        return await aretry(in_turn, policy, self._url)

    async def _count_partitions(self) -> None:
        """Until a worker has said how many there are, every call asks again."""
        self.check_usable()
        if not self._partitions.is_counted:
            redis = self._partitions.client_of(self.keys.meta_slot)
            ask: Any = lambda: redis.hget(self.keys.meta, PARTITIONS_FIELD)  # noqa: E731
            self._partitions.learn(await self._call(ask))


async def _ask(redis: Redis, questions: list[Question]) -> list[Any]:
    """All in one round trip."""
    pipeline = redis.pipeline(transaction=False)
    for question in questions:
        question(pipeline)
    return answers(await pipeline.execute(raise_on_error=False))
