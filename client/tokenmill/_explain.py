"""Why a request has no answer yet, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from redis.exceptions import ResponseError

from ._status import Status
from .keys import GROUP, TENANT_COUNTER_PREFIX, Keyspace

#: A worker that asked for work or renewed a lease within so many leases is alive.
ALIVE_LEASES = 3


class Explanation(BaseModel):
    """A request's status, what stands around it in the queue, and a sentence about both.

    `workers` are those seen lately; `queued` and `running` count the requests of the pool,
    `queued_of_tenant` those of the request's tenant; `events` is the length of its log.
    """

    model_config = ConfigDict(frozen=True)

    status: Status
    summary: str
    workers: list[str]
    queued: int
    queued_of_tenant: int
    running: int
    events: int

    def __str__(self) -> str:
        return f"{self.status.id}: {self.summary}"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `Explanation` needs besides the record."""

    workers: list[str]
    queued: int
    queued_of_tenant: int
    running: int
    events: int

    @staticmethod
    def ask(pipeline: Any, keys: Keyspace, status: Status) -> None:
        """Put the questions into a pipeline, sync or async."""
        tenant = f"{TENANT_COUNTER_PREFIX}{status.tenant}"
        pipeline.hmget(keys.counters, ["queued", "leased", tenant])
        pipeline.xlen(keys.log(status.id))
        for stream in keys.ready_streams.values():
            pipeline.xinfo_consumers(stream, GROUP)

    @classmethod
    def parse(cls, replies: Sequence[Any], lease_ms: int) -> Surroundings:
        """From the replies, errors included: they are raised, except those that mean "none"."""
        for reply in replies:
            if isinstance(reply, ResponseError) and not _is_unread_stream(reply):
                raise reply
        (queued, running, of_tenant), events, *streams = replies
        workers = {
            consumer["name"]
            for consumers in streams
            if not isinstance(consumers, ResponseError)
            for consumer in consumers
            if consumer["idle"] <= ALIVE_LEASES * lease_ms
        }
        return cls(
            workers=sorted(workers),
            queued=int(queued or 0),
            queued_of_tenant=int(of_tenant or 0),
            running=int(running or 0),
            events=int(events),
        )


def _is_unread_stream(error: ResponseError) -> bool:
    """No worker has ever read this stream, or nothing was ever in it."""
    return "no such key" in str(error).lower() or "NOGROUP" in str(error)


def explain(status: Status, around: Surroundings) -> Explanation:
    return Explanation(
        status=status,
        summary=_summary(status, around),
        workers=around.workers,
        queued=around.queued,
        queued_of_tenant=around.queued_of_tenant,
        running=around.running,
        events=around.events,
    )


def _summary(status: Status, around: Surroundings) -> str:
    if status.ended:
        why = f" ({status.code}: {status.message})" if status.code else ""
        return f"ended: {status.state}{why}"
    if status.state == "leased":
        alive = "" if status.worker in around.workers else ", which has not been heard of lately"
        return f"attempt {status.attempts} runs on {status.worker}{alive}; {around.events} events"
    return f"{_waiting(status, around)}; {_workforce(around)}"


def _waiting(status: Status, around: Surroundings) -> str:
    if status.state == "held":
        return (
            f"waits behind other requests of tenant {status.tenant} "
            f"({around.queued_of_tenant} wait), so that other tenants get their turn"
        )
    if status.state == "delayed":
        return (
            f"waits to be tried again ({status.retries} errors reported, "
            f"{status.strikes} workers lost)"
        )
    again = f" again, after attempt {status.attempts}" if status.attempts else ""
    return f"ready{again} with priority {status.priority}, {around.queued} requests wait"


def _workforce(around: Surroundings) -> str:
    if not around.workers:
        return "no worker of this pool is alive: start one"
    return f"{len(around.workers)} workers run {around.running} requests"
