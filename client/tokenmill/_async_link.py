"""A client's asyncio way to its queue: repeats calls while Redis is away, and listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ._async_listener import AsyncListener
from ._base import (
    FIRST_CONTACT_S,
    HEAD_FIELDS,
    BaseLink,
    ClientOptions,
    accepted,
    log_range,
    parse_read,
)
from ._cancellation import keep_cancellation
from ._explain import Explanation, Surroundings, explain
from ._redis import aconnect
from ._redis_errors import RetryPolicy, aretry
from ._requests import Submission
from ._session import Read, RecordHead
from ._status import Status
from .errors import ConfigurationError, TokenmillError, UnknownRequest
from .record import RECORD_FIELDS, Record
from .replies import EnqueueReply
from .scripts import arun

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")


class AsyncLink(BaseLink):
    """Belongs to one event loop."""

    def __init__(self, options: ClientOptions, given: Redis | None) -> None:
        super().__init__(options, given)
        self._redis: Redis = given or aconnect(options.url, options.redis)
        self.listener = AsyncListener(self._redis, self.keys.channel(""))
        self._loop: asyncio.AbstractEventLoop | None = None

    async def enqueue(self, submission: Submission) -> EnqueueReply:
        """Put a request into the queue; raises when it is refused."""
        call = self._enqueue_call(submission)
        reply = await self._call(lambda: arun(self._redis, call))
        accepted(submission, reply)
        return reply

    async def read(self, request_id: str, action: Read) -> tuple[RecordHead | None, list[str]]:
        """What `action` asks for."""

        async def read() -> Any:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hmget(self.keys.record(request_id), list(HEAD_FIELDS))
            pipeline.xrange(self.keys.log(request_id), min=log_range(action), count=action.count)
            return await pipeline.execute()

        return parse_read(await self._call(read))

    async def record(self, request_id: str) -> Record:
        """Raises `UnknownRequest` if there is none."""
        key = self.keys.record(request_id)
        values: Any = await self._call(lambda: self._redis.hmget(key, list(RECORD_FIELDS)))
        record = Record.parse(values)
        if record is None:
            raise UnknownRequest(f"no request {request_id}")
        return record

    async def explain(self, request_id: str) -> Explanation:
        """Raises `UnknownRequest` if there is no such request."""
        status = Status.of(request_id, await self.record(request_id))

        async def read() -> Surroundings:
            pipeline = self._redis.pipeline(transaction=False)
            Surroundings.ask(pipeline, self.keys, status)
            replies = await pipeline.execute(raise_on_error=False)
            return Surroundings.parse(replies, self.calls.policy.lease_ms)

        return explain(status, await self._call(read))

    async def cancel(self, request_id: str) -> bool:
        """True if this call ended the request. Raises `UnknownRequest` if there is none."""
        call = self.calls.cancel(request_id)
        reply = await self._call(lambda: arun(self._redis, call))
        if reply.state is None:
            raise UnknownRequest(f"no request {request_id}")
        return reply.cancelled

    async def give_up(self, request_id: str) -> None:
        """Cancel without complaints, and without waiting for a Redis that is away."""
        call = self.calls.cancel(request_id)
        with contextlib.suppress(TokenmillError):
            await aretry(lambda: arun(self._redis, call), RetryPolicy(FIRST_CONTACT_S), self._url)

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
        await self.listener.aclose()
        if self._owns_redis:
            await self._redis.aclose()

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T:
        self.check_usable()
        attempt = aretry(operation, self._retry_policy(), self._url)
        reply = await keep_cancellation(attempt)
        self._reached = True
        return reply
