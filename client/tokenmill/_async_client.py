"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from ._async_listener import AsyncListener
from ._async_stream import AsyncTokenStream
from ._base import (
    FIRST_CONTACT_S,
    GRACE_S,
    HEAD_FIELDS,
    BaseClient,
    ClientOptions,
    accepted,
    log_range,
    parse_read,
    require_messages,
    require_prompt,
)
from ._redis import aconnect
from ._redis_errors import RetryPolicy, aretry
from ._requests import (
    Messages,
    Prompt,
    RequestParams,
    Submission,
    check_after,
    check_id,
    check_timeout,
)
from ._session import Read, RecordHead
from ._status import Handle, Status
from ._stream_base import StreamPlan
from .calls import QueuePolicy
from .errors import ConfigurationError, TokenmillError, UnknownRequest
from .protocol import Completion
from .record import RECORD_FIELDS, Record
from .replies import EnqueueReply
from .scripts import arun

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")


class AsyncClient(BaseClient):
    """`Client` for asyncio; see there for the options. Belongs to one event loop."""

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str = "tokenmill",
        pool: str = "default",
        tenant: str = "default",
        timeout_s: float = 5.0,
        connect_timeout_s: float = 2.0,
        retry_for_s: float = 10.0,
        resubmit: bool = False,
        policy: QueuePolicy | None = None,
        redis: Redis | None = None,
    ) -> None:
        options = ClientOptions(
            url=url,
            namespace=namespace,
            pool=pool,
            tenant=tenant,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            retry_for_s=retry_for_s,
            resubmit=resubmit,
            policy=policy,
        )
        super().__init__(options, redis)
        self._redis: Redis = redis or aconnect(url, self._redis_options())
        self._listener = AsyncListener(self._redis, self.keys.channel(""))
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def generate(self, prompt: Prompt, **params: Unpack[RequestParams]) -> Completion:
        """Continue text or token ids, and wait for the whole answer; see `Client.generate`."""
        require_prompt(prompt)
        async with self.stream(prompt, **params) as stream:
            return await stream.completion()

    async def chat(self, messages: Messages, **params: Unpack[RequestParams]) -> Completion:
        """Answer a chat, and wait for the whole answer; see `Client.generate`."""
        require_messages(messages)
        async with self.stream(messages, **params) as stream:
            return await stream.completion()

    def stream(self, prompt: Prompt, **params: Unpack[RequestParams]) -> AsyncTokenStream:
        """Text, token ids or chat messages, and the answer as it comes; see `Client.stream`."""
        submission = self._build(prompt, params)
        plan = StreamPlan(
            request_id=submission.request_id,
            submission=submission,
            timeout_s=submission.deadline_s + GRACE_S,
        )
        return AsyncTokenStream(self, plan)

    async def submit(self, prompt: Prompt, **params: Unpack[RequestParams]) -> Handle:
        """Enqueue and return; see `Client.submit`."""
        submission = self._build(prompt, params)
        return accepted(submission, await self._send(submission))

    def attach(self, request_id: str, after: int = 0) -> AsyncTokenStream:
        """The stream of a request that is there already; see `Client.attach`."""
        plan = StreamPlan(request_id=check_id(request_id), after=check_after(after))
        return AsyncTokenStream(self, plan)

    async def result(self, request_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for the end of a request; see `Client.result`."""
        plan = StreamPlan(request_id=check_id(request_id), timeout_s=check_timeout(timeout_s))
        return await AsyncTokenStream(self, plan).completion()

    async def cancel(self, request_id: str) -> bool:
        """End a request; see `Client.cancel`."""
        call = self._calls.cancel(check_id(request_id))
        reply = await self._call(lambda: arun(self._redis, call))
        if reply.state is None:
            raise UnknownRequest(f"no request {request_id}")
        return reply.cancelled

    async def status(self, request_id: str) -> Status:
        """Where a request stands; see `Client.status`."""
        key = self.keys.record(check_id(request_id))
        values: Any = await self._call(lambda: self._redis.hmget(key, list(RECORD_FIELDS)))
        record = Record.parse(values)
        if record is None:
            raise UnknownRequest(f"no request {request_id}")
        return Status.of(request_id, record)

    async def aclose(self) -> None:
        """Stop listening and close the connections. Requests go on."""
        if self._closed:
            return
        self._closed = True
        await self._listener.aclose()
        if self._owns_redis:
            await self._redis.aclose()

    async def _enqueue(self, submission: Submission) -> EnqueueReply:
        """Put a request into the queue; raises when it is refused."""
        reply = await self._send(submission)
        accepted(submission, reply)
        return reply

    async def _send(self, submission: Submission) -> EnqueueReply:
        call = self._enqueue_call(submission)
        return await self._call(lambda: arun(self._redis, call))

    async def _read(self, request_id: str, action: Read) -> tuple[RecordHead | None, list[str]]:
        async def read() -> Any:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hmget(self.keys.record(request_id), list(HEAD_FIELDS))
            pipeline.xrange(self.keys.log(request_id), min=log_range(action), count=action.count)
            return await pipeline.execute()

        return parse_read(await self._call(read))

    async def _give_up(self, request_id: str) -> None:
        """Cancel without waiting for a Redis that is away."""
        call = self._calls.cancel(request_id)
        with contextlib.suppress(TokenmillError):
            await aretry(lambda: arun(self._redis, call), RetryPolicy(FIRST_CONTACT_S), self._url)

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T:
        self._check_usable()
        reply = await aretry(operation, self._retry_policy(), self._url)
        self._reached = True
        return reply

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConfigurationError(
                "an AsyncClient belongs to the event loop that used it first; make one per loop"
            )
