"""Builders of script calls: the typed face of the queue, shared by sync and async code.

calls = QueueCalls(Keyspace(pool="chat"))
reply = run(client, calls.enqueue("id-1", body=body))
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from . import limits
from ._trace_context import NO_TRACE, TraceContext
from ._work import estimate_tokens
from .keys import Keyspace
from .replies import (
    AdmitStatus,
    CancelReply,
    EnqueueReply,
    FinishReply,
    Lease,
    LeaseReply,
    PeekReply,
    ReadyEntry,
    ReleaseReply,
    TickReport,
)
from .scripts import Argument, ScriptCall, load_script

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How the queue behaves. Everybody who uses one pool should use the same policy."""

    deadline_ms: int = int(limits.DEFAULT_DEADLINE_S * 1000)
    retention_ms: int = int(limits.DEFAULT_RETENTION_S * 1000)
    max_queued: int = limits.MAX_QUEUED
    max_queued_per_tenant: int = limits.MAX_QUEUED_PER_TENANT
    window: int = limits.TENANT_WINDOW
    #: Leased at a time, times the tenant's weight; 0: any number. The workers' value counts.
    max_running_per_tenant: int = 0
    max_body_bytes: int = limits.MAX_BODY_BYTES
    lease_ms: int = 15_000
    max_strikes: int = 3  # lost workers in a row, each without a token
    max_attempts: int = 20  # leases of one request, whatever they achieved; hand-overs do not count
    max_deliveries: int = 5  # reads of one entry that never became a lease
    max_retries: int = 2  # errors reported by workers
    backoff_ms: int = 1_000
    tick_limit: int = 100  # requests per kind of work and tick: bounds how long Redis is held
    tidy_ms: int = 30_000
    dead_letters: int = 1_000
    dead_letter_ms: int = 7 * 86_400_000
    dead_letter_body_ms: int = 86_400_000  # so long it can be queued again; 0: never, no body kept
    publish: Literal["PUBLISH", "SPUBLISH"] = "PUBLISH"  # SPUBLISH (Redis 7) in a cluster


class AppendEvent(NamedTuple):
    """One event of a running request: `seq` is dense from 1, `payload` the event's JSON."""

    request_id: str
    fence: str  # of the lease under which it is written
    seq: int
    payload: str


def body_sha(body: str) -> str:
    """What tells a repeated submission from a conflicting one."""
    return hashlib.sha256(body.encode()).hexdigest()[:32]


def _as_is(reply: list[int]) -> list[int]:
    return reply


class QueueCalls:
    """The calls of one pool. Sends nothing: pass a call to `scripts.run` or `scripts.arun`."""

    def __init__(self, keys: Keyspace, policy: QueuePolicy | None = None) -> None:
        self.keys = keys
        self.policy = policy or QueuePolicy()
        self._key = keys.owners
        self._publish = self.policy.publish
        self._ending = self._options("retention_ms", "window")

    def enqueue(
        self,
        request_id: str,
        *,
        body: str,
        tenant: str = DEFAULT_TENANT,
        priority_class: str = "1",
        delay_ms: int | None = None,
        deadline_ms: int | None = None,
        queue_deadline_ms: int | None = None,
        first_token_deadline_ms: int | None = None,
        trace: TraceContext | None = None,
    ) -> ScriptCall[EnqueueReply]:
        """Put a request into the queue; the same id and body again is harmless (DUP).

        It may be served after `delay_ms`. From then on count the deadlines: until its end, its
        first lease and its first token. `trace` is the trace that the worker's spans join.
        """
        given = {
            "delay_ms": delay_ms or None,
            "deadline_ms": deadline_ms,
            "queue_deadline_ms": queue_deadline_ms,
            "first_token_deadline_ms": first_token_deadline_ms,
            **(trace or NO_TRACE).fields(),
        }
        options = self._options(
            "deadline_ms", "retention_ms", "max_queued", "max_queued_per_tenant", "window",
            "max_body_bytes", work_tokens=estimate_tokens(body),
            **{k: v for k, v in given.items() if v is not None},
        )  # fmt: skip
        args = (options, request_id, tenant, priority_class, body_sha(body), body)
        return ScriptCall(load_script("enqueue"), self._key, args, EnqueueReply.parse)

    def admit(self, entry: ReadyEntry) -> ScriptCall[AdmitStatus]:
        """Make the record of an entry that a producer wrote with a plain XADD."""
        body = entry.body or ""
        options = self._options(
            "deadline_ms", "retention_ms", "max_queued", "max_body_bytes",
            work_tokens=estimate_tokens(body),
            **TraceContext.parse(entry.traceparent, entry.tracestate).fields(),
        )  # fmt: skip
        args = (
            options, entry.ready_class, entry.entry_id, entry.request_id,
            entry.tenant or DEFAULT_TENANT, body_sha(body), body,
        )  # fmt: skip
        return ScriptCall(load_script("admit"), self._key, args, AdmitStatus.parse)

    def lease(
        self, worker: str, entries: Sequence[ReadyEntry], *, fingerprint: str = ""
    ) -> ScriptCall[list[LeaseReply]]:
        """Take entries just read; one reply each, in order. Repeated: the same leases again."""
        args: list[Argument] = [self._ending, worker, fingerprint]
        for entry in entries:
            args += (entry.ready_class, entry.entry_id, entry.request_id)

        def parse(replies: list[Any]) -> list[LeaseReply]:
            return list(map(LeaseReply.parse, entries, replies))

        return ScriptCall(load_script("lease"), self._key, tuple(args), parse)

    def peek(self, limit: int) -> ScriptCall[PeekReply]:
        """The ages of the first `limit` entries of each class that nobody has read."""
        args = (self._options(limit=limit),)
        return ScriptCall(load_script("peek"), self._key, args, PeekReply.parse)

    def append(self, events: Iterable[AppendEvent]) -> ScriptCall[list[int]]:
        """Store and publish one event per running request; a code each, see `replies`.

        At most `limits.MAX_REQUESTS_PER_APPEND` events a call: Redis serves nobody meanwhile.
        """
        return self.append_packed([
            text
            for request_id, fence, seq, payload in events
            for text in (request_id, fence, str(seq), payload)
        ])  # fmt: skip

    def append_packed(self, arguments: Sequence[str]) -> ScriptCall[list[int]]:
        """`append` for events whose fields lie in one list, four for each, the number as text.

        For every token of every request: no object for each, and hiredis packs text in half the
        time that it takes for an integer.
        """
        check_batch("append", len(arguments) // 4, limits.MAX_REQUESTS_PER_APPEND)
        args = (self._publish, *arguments)
        return ScriptCall(load_script("append"), self._key, args, _as_is)

    def heartbeat(self, worker: str, leases: Iterable[Lease]) -> ScriptCall[list[int]]:
        """Renew leases; per lease the length of its log, or `replies.LOST`."""
        args: list[Argument] = [worker]
        for lease in leases:
            args += (lease.request_id, lease.fence, lease.ready_class, lease.entry_id)
        check_batch("heartbeat", len(args) // 4, limits.MAX_REQUESTS_PER_HEARTBEAT)
        return ScriptCall(load_script("heartbeat"), self._key, tuple(args), _as_is)

    def finish(
        self,
        end: AppendEvent,
        *,
        state: Literal["done", "failed"] = "done",
        usage: str = "{}",
        code: str = "",
        message: str = "",
        facts: str = "",
    ) -> ScriptCall[FinishReply]:
        """End a request; `end` is its end event, `usage` JSON kept in the record.

        `facts`, here and below, is a JSON object of numbers for the request's history.
        """
        request_id, fence, seq, payload = end
        args = (
            self._ending, request_id, fence, seq, state, payload, usage, code, message, facts,
        )  # fmt: skip
        return ScriptCall(load_script("finish"), self._key, args, FinishReply.parse)

    def hand_over(
        self,
        request_id: str,
        fence: str,
        *,
        reason: Literal["drain", "no_room"] = "drain",
        facts: str = "",
    ) -> ScriptCall[ReleaseReply]:
        """Give a request back for another worker to continue at once; no attempt is counted."""
        return self._release(request_id, fence, reason, facts=facts)

    def retry_later(
        self, request_id: str, fence: str, *, delay_ms: int, message: str, facts: str = ""
    ) -> ScriptCall[ReleaseReply]:
        """Give a request back after an error; beyond `max_retries` it ends with `message`."""
        return self._release(
            request_id, fence, "error", delay_ms=delay_ms, message=message, facts=facts
        )

    def cancel(
        self, request_id: str, *, message: str = "cancelled by the client"
    ) -> ScriptCall[CancelReply]:
        """End a request from outside; final when it returns."""
        args = (self._ending, request_id, message)
        return ScriptCall(load_script("cancel"), self._key, args, CancelReply.parse)

    def tick(self, *, jitter: float) -> ScriptCall[TickReport]:
        """One round of maintenance; `jitter` in [0, 1) spreads the retries of lost requests."""
        options = self._options(
            "lease_ms", "max_strikes", "max_attempts", "max_deliveries", "backoff_ms",
            "deadline_ms", "retention_ms", "window", "max_running_per_tenant", "max_body_bytes",
            "tidy_ms", "dead_letters", "dead_letter_ms", "dead_letter_body_ms",
            jitter=jitter, limit=self.policy.tick_limit,
        )  # fmt: skip
        return ScriptCall(load_script("tick"), self._key, (options,), TickReport.parse)

    def _release(
        self,
        request_id: str,
        fence: str,
        reason: str,
        *,
        delay_ms: int = 0,
        message: str = "",
        facts: str = "",
    ) -> ScriptCall[ReleaseReply]:
        options = self._options("retention_ms", "max_retries", "window")
        args = (options, request_id, fence, reason, delay_ms, message, facts)
        return ScriptCall(load_script("release"), self._key, args, ReleaseReply.parse)

    def _options(self, *names: str, **values: Any) -> str:
        options = {name: getattr(self.policy, name) for name in ("publish", *names)}
        return json.dumps({**options, **values})


def check_batch(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"{name}: {size} requests in one call; the limit is {limit}")
