"""What the sync and the async side have in common: options, requests, replies. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._redis import AnyRedis, RedisOptions, knows_master, redis_url
from ._redis_errors import RetryPolicy
from ._requests import Prompt, Submission, build, check_tenant
from ._session import Read, RecordHead
from ._status import Handle
from ._stream_base import StreamPlan
from ._trace_context import TraceContext
from ._validation import check_number
from .calls import QueueCalls, QueuePolicy
from .errors import ConfigurationError, InvalidRequest, QueueFull, RequestConflict, RequestTooLarge
from .keys import Keyspace
from .replies import EnqueueReply, EnqueueStatus
from .scripts import ScriptCall

#: A server that never answered is not waited for: the address is wrong more often than not.
FIRST_CONTACT_S: Final = 1.0
#: Calls of one client under way at a time, each on a connection of its own; others wait for their
#: turn. Well below the 100 connections at which redis-py refuses.
CALLS_AT_A_TIME: Final = 64
#: The record fields of a stream's `RecordHead`.
HEAD_FIELDS: Final = ("created", "end_seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """See `Client`; checked on construction."""

    url: str | None
    namespace: str
    pool: str
    tenant: str
    timeout_s: float
    connect_timeout_s: float
    retry_for_s: float
    resubmit: bool
    insecure: bool
    policy: QueuePolicy | None

    @property
    def redis(self) -> RedisOptions:
        return RedisOptions(
            socket_timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            client_name="tokenmill-client",
            insecure=self.insecure or None,  # None: the environment may allow it
        )


class BaseLink:
    """What a link knows without asking Redis."""

    def __init__(self, options: ClientOptions, given: Any) -> None:
        check_tenant(options.tenant)
        for name in ("timeout_s", "connect_timeout_s"):
            check_number(name, getattr(options, name), low=0, high=3600)
        if given is not None and not given.get_encoder().decode_responses:
            raise ConfigurationError("redis: build the client with decode_responses=True")
        self.options = options
        self.keys = Keyspace(options.namespace, options.pool)
        self.policy = options.policy or QueuePolicy()
        self.closed = False
        self._url = "the given client" if given is not None else redis_url(options.url)
        self._owns_redis = given is None
        self._reached = False  # Redis has answered at least once

    def build(self, prompt: Prompt, params: Mapping[str, Any]) -> Submission:
        """Validate a request; see `_requests.build`."""
        deadline_s = self.policy.deadline_ms / 1000
        return build(prompt, params, {"tenant": self.options.tenant, "deadline_s": deadline_s})

    def _retry_policy(self, clients: Iterable[AnyRedis]) -> RetryPolicy:
        """As of now. It is longer as soon as Sentinels or nodes of a cluster have named a master,
        for if that one is away they are about to name another."""
        timeout_s = self.options.retry_for_s
        is_known = self._reached or any(map(knows_master, clients))
        return RetryPolicy(timeout_s if is_known else min(timeout_s, FIRST_CONTACT_S))

    def _enqueue_call(
        self, calls: QueueCalls, submission: Submission, trace: TraceContext
    ) -> ScriptCall[EnqueueReply]:
        return calls.enqueue(
            submission.request_id,
            body=submission.body,
            tenant=submission.tenant,
            priority_class=submission.priority_class,
            trace=trace,
            **submission.timing.enqueue_options(),
        )


def plan_of(submission: Submission, *, cancel_on_exit: bool = True) -> StreamPlan:
    """The stream of a request that is about to be submitted."""
    return StreamPlan(
        request_id=submission.request_id,
        submission=submission,
        timeout_s=submission.timing.patience_s(),
        cancel_on_exit=cancel_on_exit,
    )


def require_prompt(prompt: Prompt) -> None:
    """Raises `InvalidRequest` for the messages of a chat."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    if is_list and prompt and isinstance(prompt[0], Mapping):
        raise InvalidRequest("prompt", "these are chat messages; use chat() or stream()")


def require_messages(messages: object) -> None:
    """Raises `InvalidRequest` for anything but a list of messages."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", "must be a list of messages; use generate() for text")
    if not messages or isinstance(messages[0], int):
        raise InvalidRequest("messages", "must be a list of at least one message")


def accepted(submission: Submission, reply: EnqueueReply) -> Handle:
    """The handle, or the exception for a refusal."""
    match reply.status:
        case EnqueueStatus.OK:
            return Handle(submission.request_id)
        case EnqueueStatus.DUP:
            return Handle(submission.request_id, is_new=False)
        case EnqueueStatus.CONFLICT:
            raise RequestConflict(
                f"request {submission.request_id}: the id is taken by a request with another "
                "content; use a new id"
            )
        case EnqueueStatus.TOO_LARGE:
            raise RequestTooLarge("prompt", "the encoded request is over the queue's limit")
        case EnqueueStatus.FULL:
            what = "Redis is short of memory" if reply.reason == "memory" else "the queue is full"
            raise QueueFull(
                f"{what} ({reply.queued} requests wait)", retry_after_s=reply.retry_after_s
            )
        case EnqueueStatus.TENANT_FULL:
            raise QueueFull(
                f"tenant {submission.tenant} has {reply.queued} requests waiting, its full share",
                code="tenant_full",
                retry_after_s=reply.retry_after_s,
            )


def parse_read(reply: Sequence[Any]) -> tuple[RecordHead | None, list[str]]:
    """From the replies to HMGET of `HEAD_FIELDS` and XRANGE of the log."""
    head, entries = reply
    return RecordHead.parse(*head), [fields.get("d", "") for _, fields in entries]


def log_range(action: Read) -> str:
    """The start of the XRANGE that `action` asks for."""
    return f"({action.after}-0" if action.after else "-"
