"""The client."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

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
from ._listener import Listener
from ._redis import connect
from ._redis_errors import RetryPolicy, retry
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
from ._stream import TokenStream
from ._stream_base import StreamPlan
from .calls import QueuePolicy
from .errors import TokenmillError, UnknownRequest
from .protocol import Completion
from .record import RECORD_FIELDS, Record
from .replies import EnqueueReply
from .scripts import run

if TYPE_CHECKING:
    from redis import Redis

T = TypeVar("T")


class Client(BaseClient):
    """Talks to one pool of workers through Redis.

        with Client("redis://localhost:6379/0") as client:
            print(client.generate("Once upon a time", max_tokens=32).text)

    Args:
        url: redis://, rediss:// or unix://. Default: TOKENMILL_REDIS_URL, REDIS_URL, localhost.
        namespace: the first part of every key.
        pool: the workers to ask: all of one pool serve the same model.
        tenant: whose share of the queue requests count against.
        timeout_s: how long one command may take.
        connect_timeout_s: how long a connection may take.
        retry_for_s: how long a call tries again while Redis is away. A Redis that never answered
            is given up after a second.
        resubmit: whether a stream enqueues its request again when Redis has lost it.
        policy: limits of the queue, if they are not the default ones.
        redis: a redis-py client with `decode_responses=True`, instead of `url`; stays open.

    Every method may be called from several threads at once; all streams share one connection for
    live messages. After a fork the child makes connections of its own.
    """

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
        self._redis: Redis = redis or connect(url, self._redis_options())
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(self, prompt: Prompt, **params: Unpack[RequestParams]) -> Completion:
        """Continue text or token ids, and wait for the whole answer.

        `params` are the fields of `SamplingParams` (or one such object as `sampling_params`) and
        `request_id`, `priority` ("high", "normal", "low"), `deadline_s`, `tenant`, `model`,
        `meta`. Leaving early, as by Ctrl-C, cancels the request.

        Raises:
            InvalidRequest: a wrong value; nothing was sent. Also its kinds UnsupportedParameter
                and RequestTooLarge.
            QueueFull: refused for now; says when to try again.
            QueueUnavailable: Redis cannot be reached.
            RequestFailed: it ended without a completion; carries what there is. Also its kinds
                RequestCancelled, DeadlineExceeded and RequestDead.
            ResultTimeout: the deadline is over, and no worker said so.
        """
        require_prompt(prompt)
        with self.stream(prompt, **params) as stream:
            return stream.completion()

    def chat(self, messages: Messages, **params: Unpack[RequestParams]) -> Completion:
        """Answer a chat through the model's template; otherwise like `generate`."""
        require_messages(messages)
        with self.stream(messages, **params) as stream:
            return stream.completion()

    def stream(self, prompt: Prompt, **params: Unpack[RequestParams]) -> TokenStream:
        """Text, token ids or chat messages, and the answer as it comes.

            with client.stream("Once upon a time") as stream:
                for text in stream:
                    print(text, end="", flush=True)
            print(stream.completion().usage)

        Leaving the block early cancels the request. Raises like `generate`, from the block on.
        """
        submission = self._build(prompt, params)
        plan = StreamPlan(
            request_id=submission.request_id,
            submission=submission,
            timeout_s=submission.deadline_s + GRACE_S,
        )
        return TokenStream(self, plan)

    def submit(self, prompt: Prompt, **params: Unpack[RequestParams]) -> Handle:
        """Enqueue and return; `attach` or `result` get the answer, from any process.

        With a `request_id`, submitting the same request again is harmless.

        Raises:
            RequestConflict: the id is taken by a request with another content.
        """
        submission = self._build(prompt, params)
        return accepted(submission, self._send(submission))

    def attach(self, request_id: str, after: int = 0) -> TokenStream:
        """The stream of a request that is there already, from its first event or behind one.

        Works in any process, until the retention is over. `after` is the `seq` of the last event
        seen. Leaving early does not cancel the request.
        """
        plan = StreamPlan(request_id=check_id(request_id), after=check_after(after))
        return TokenStream(self, plan)

    def result(self, request_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for the end of a request and return the answer; raises like `generate`.

        Raises:
            ResultTimeout: it did not end within `timeout_s`; it goes on.
            UnknownRequest: there is no such request, or its retention is over.
        """
        plan = StreamPlan(request_id=check_id(request_id), timeout_s=check_timeout(timeout_s))
        return TokenStream(self, plan).completion()

    def cancel(self, request_id: str) -> bool:
        """End a request; final when it returns. False if it had ended already.

        Raises:
            UnknownRequest: there is no such request, or its retention is over.
        """
        call = self._calls.cancel(check_id(request_id))
        reply = self._call(lambda: run(self._redis, call))
        if reply.state is None:
            raise UnknownRequest(f"no request {request_id}")
        return reply.cancelled

    def status(self, request_id: str) -> Status:
        """Where a request stands.

        Raises:
            UnknownRequest: there is no such request, or its retention is over.
        """
        key = self.keys.record(check_id(request_id))
        values: Any = self._call(lambda: self._redis.hmget(key, list(RECORD_FIELDS)))
        record = Record.parse(values)
        if record is None:
            raise UnknownRequest(f"no request {request_id}")
        return Status.of(request_id, record)

    def close(self) -> None:
        """Stop listening and close the connections. Requests go on."""
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            self._listener.close(self._options.timeout_s)
        if self._owns_redis:
            self._redis.close()

    def _enqueue(self, submission: Submission) -> EnqueueReply:
        """Put a request into the queue; raises when it is refused."""
        reply = self._send(submission)
        accepted(submission, reply)
        return reply

    def _send(self, submission: Submission) -> EnqueueReply:
        call = self._enqueue_call(submission)
        return self._call(lambda: run(self._redis, call))

    def _read(self, request_id: str, action: Read) -> tuple[RecordHead | None, list[str]]:
        def read() -> Any:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hmget(self.keys.record(request_id), list(HEAD_FIELDS))
            pipeline.xrange(self.keys.log(request_id), min=log_range(action), count=action.count)
            return pipeline.execute()

        return parse_read(self._call(read))

    def _give_up(self, request_id: str) -> None:
        """Cancel without waiting for a Redis that is away."""
        call = self._calls.cancel(request_id)
        with contextlib.suppress(TokenmillError):
            retry(lambda: run(self._redis, call), RetryPolicy(FIRST_CONTACT_S), self._url)

    def _call(self, operation: Callable[[], T]) -> T:
        self._check_usable()
        reply = retry(operation, self._retry_policy(), self._url)
        self._reached = True
        return reply

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._pid != os.getpid():
            self._listen()  # forked: threads stay behind, and redis-py renews its connections

    def _listen(self) -> None:
        self._pid = os.getpid()
        self._listener = Listener(self._redis, self.keys.channel(""))
