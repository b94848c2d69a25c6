"""The client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from ._base import ClientOptions, accepted, plan_of, require_messages, require_prompt
from ._explain import Explanation
from ._link import Link
from ._map import MapPlan, run_map
from ._progress import Progress
from ._requests import Messages, Prompt, RequestParams, check_after, check_id, check_timeout
from ._status import Handle, Status
from ._stream import TokenStream
from ._stream_base import StreamPlan
from .calls import QueuePolicy
from .errors import RequestFailed
from .keys import Keyspace
from .protocol import Completion

if TYPE_CHECKING:
    from redis import Redis


class Client:
    """Talks to one pool of workers through Redis.

        with Client("redis://localhost:6379/0") as client:
            print(client.generate("Once upon a time", max_tokens=32).text)

    Args:
        url: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://, see
            docs/deployment.md. Default: TOKENMILL_REDIS_URL, REDIS_URL, localhost.
        namespace: the first part of every key.
        pool: the workers to ask: all of one pool serve the same model.
        tenant: whose share of the queue requests count against.
        timeout_s: how long one command may take.
        connect_timeout_s: how long a connection may take.
        retry_for_s: how long a call tries again while Redis is away. A Redis that never answered
            (nor a Sentinel that knows its master) is given up after a second.
        resubmit: whether a stream enqueues its request again when Redis has lost it.
        insecure: whether a public host may be talked to without verified TLS.
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
        self._link = Link(options, redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def keys(self) -> Keyspace:
        """The names of this client's pool in Redis."""
        return self._link.keys

    def generate(self, prompt: Prompt, **params: Unpack[RequestParams]) -> Completion:
        """Continue text or token ids, and wait for the whole answer.

        `params` are the fields of `SamplingParams` (or one such object as `sampling_params`) and
        `request_id`, `priority` ("high", "normal", "low"), `tenant`, `model`, `meta`, `not_before`
        (an aware datetime, a timedelta or seconds since the epoch; at most a day ahead),
        `deadline_s`, `queue_deadline_s` (until a worker takes it), `first_token_deadline_s`.
        Leaving early, as by Ctrl-C, cancels the request.

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

    def stream(
        self, prompt: Prompt, *, cancel_on_exit: bool = True, **params: Unpack[RequestParams]
    ) -> TokenStream:
        """Text, token ids or chat messages, and the answer as it comes.

            with client.stream("Once upon a time") as stream:
                for text in stream:
                    print(text, end="", flush=True)
            print(stream.completion().usage)

        Leaving the block early cancels the request; with `cancel_on_exit=False` it goes on, and
        `attach(id, after=last_seq)` continues, in any process. Wrong arguments raise at once, the
        rest like `generate` from the block on; `StreamDiverged` if Redis lost text that was
        handed out.
        """
        submission = self._link.build(prompt, params)
        return TokenStream(self._link, plan_of(submission, cancel_on_exit=cancel_on_exit))

    def submit(self, prompt: Prompt, **params: Unpack[RequestParams]) -> Handle:
        """Enqueue and return; `attach` or `result` get the answer, from any process.

        With a `request_id`, submitting the same request again is harmless.

        Raises:
            RequestConflict: the id is taken by a request with another content.
        """
        submission = self._link.build(prompt, params)
        return accepted(submission, self._link.enqueue(submission))

    def attach(self, request_id: str, after: int = 0) -> TokenStream:
        """The stream of a request that is there already, from its first event or behind one.

        Works in any process, until the retention is over. `after` is the `seq` of the last event
        seen. Leaving early does not cancel the request.
        """
        plan = StreamPlan(request_id=check_id(request_id), after=check_after(after))
        return TokenStream(self._link, plan)

    def result(self, request_id: str, *, timeout_s: float | None = None) -> Completion:
        """Wait for the end of a request and return the answer; raises like `generate`.

        Raises:
            ResultTimeout: it did not end within `timeout_s` (0: only look); it goes on.
            UnknownRequest: there is no such request, or its retention is over.
        """
        plan = StreamPlan(request_id=check_id(request_id), timeout_s=check_timeout(timeout_s))
        return TokenStream(self._link, plan).completion()

    def cancel(self, request_id: str) -> bool:
        """End a request; final when it returns. False if it had ended already.

        Raises:
            UnknownRequest: there is no such request, or its retention is over.
        """
        return self._link.cancel(check_id(request_id))

    def status(self, request_id: str) -> Status:
        """Where a request stands.

        Raises:
            UnknownRequest: there is no such request, or its retention is over.
        """
        return Status.of(request_id, self._link.record(check_id(request_id)))

    def explain(self, request_id: str) -> Explanation:
        """Why a request has no answer yet, and what happened to it: its status, its place in the
        queue, a sentence, and its history.

        Raises:
            UnknownRequest: there is no such request, or its retention is over.
        """
        return self._link.explain(check_id(request_id))

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 64,
        progress: bool | Progress = False,
        on_failure: Callable[[RequestFailed], Completion] | None = None,
        **params: Unpack[RequestParams],
    ) -> Iterator[Completion]:
        """The answers to many prompts, in their order, with `concurrency` requests under way.

        Takes prompts only as needed, so they may come from a generator. `progress` is True for a
        bar on stderr, or is called with the number of answers and of prompts (None: not known). A
        request that ends badly raises and the rest is cancelled, unless `on_failure` turns the
        exception into what takes its place. Fetch answers within their retention.
        """
        plan = MapPlan(
            concurrency=concurrency, progress=progress, on_failure=on_failure, params=params
        )
        return run_map(self._link, prompts, plan)

    def close(self) -> None:
        """Stop listening and close the connections. Requests go on."""
        self._link.close()
