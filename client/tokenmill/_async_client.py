"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from ._async_link import AsyncLink
from ._async_stream import AsyncTokenStream
from ._base import ClientOptions, accepted, plan_of, require_messages, require_prompt
from ._explain import Explanation
from ._map import MapPlan, arun_map
from ._progress import Progress
from ._requests import Messages, Prompt, RequestParams, check_after, check_id, check_timeout
from ._status import Handle, Status
from ._stream_base import StreamPlan
from .calls import QueuePolicy
from .errors import RequestFailed
from .keys import Keyspace
from .protocol import Completion

if TYPE_CHECKING:
    from redis.asyncio import Redis


class AsyncClient:
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
        insecure: bool = False,
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
            insecure=insecure,
            policy=policy,
        )
        self._link = AsyncLink(options, redis)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def keys(self) -> Keyspace:
        """The names of this client's pool in Redis."""
        return self._link.keys

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

    def stream(
        self, prompt: Prompt, *, cancel_on_exit: bool = True, **params: Unpack[RequestParams]
    ) -> AsyncTokenStream:
        """Text, token ids or chat messages, and the answer as it comes; see `Client.stream`."""
        submission = self._link.build(prompt, params)
        return AsyncTokenStream(self._link, plan_of(submission, cancel_on_exit=cancel_on_exit))

    async def submit(self, prompt: Prompt, **params: Unpack[RequestParams]) -> Handle:
        """Enqueue and return; see `Client.submit`."""
        submission = self._link.build(prompt, params)
        return accepted(submission, await self._link.enqueue(submission))

    def attach(self, request_id: str, after: int = 0) -> AsyncTokenStream:
        """The stream of a request that is there already; see `Client.attach`."""
        plan = StreamPlan(request_id=check_id(request_id), after=check_after(after))
        return AsyncTokenStream(self._link, plan)

    async def result(self, request_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for the end of a request; see `Client.result`."""
        plan = StreamPlan(request_id=check_id(request_id), timeout_s=check_timeout(timeout_s))
        return await AsyncTokenStream(self._link, plan).completion()

    async def cancel(self, request_id: str) -> bool:
        """End a request; see `Client.cancel`."""
        return await self._link.cancel(check_id(request_id))

    async def status(self, request_id: str) -> Status:
        """Where a request stands; see `Client.status`."""
        return Status.of(request_id, await self._link.record(check_id(request_id)))

    async def explain(self, request_id: str) -> Explanation:
        """Why a request has no answer yet; see `Client.explain`."""
        return await self._link.explain(check_id(request_id))

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 64,
        progress: bool | Progress = False,
        on_failure: Callable[[RequestFailed], Completion] | None = None,
        **params: Unpack[RequestParams],
    ) -> AsyncIterator[Completion]:
        """The answers to many prompts, in their order; see `Client.map`."""
        plan = MapPlan(
            concurrency=concurrency, progress=progress, on_failure=on_failure, params=params
        )
        return arun_map(self._link, prompts, plan)

    async def aclose(self) -> None:
        """Stop listening and close the connections. Requests go on."""
        await self._link.aclose()
