"""Why a request has no answer yet, and what happened to it so far, in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from ._inquiry import LONGEST_LINE, Surroundings
from ._status import Status
from ._timeline import TimelineEntry, read_timeline
from .keys import READY_CLASSES


class Explanation(BaseModel):
    """A request's status, what stands around it in the queue, a sentence about both, its history.

    `workers` are those seen lately; `queued` and `running` count the requests of the pool,
    `queued_of_tenant` those of the request's tenant; `events` is the length of its log. `place`
    counts the requests before it in its line (at most 1,000; None: it stands in none), which is
    that of its priority or, when it is `held`, of its tenant. `estimate_s` is the time until a
    worker takes it if requests go on to end as fast as of late; None: nobody can say.
    """

    model_config = ConfigDict(frozen=True)

    status: Status
    summary: str
    timeline: list[TimelineEntry]
    workers: list[str]
    queued: int
    queued_of_tenant: int
    running: int
    events: int
    place: int | None
    estimate_s: float | None

    def __str__(self) -> str:
        return f"{self.status.id}: {self.summary}"


def explain(status: Status, around: Surroundings) -> Explanation:
    estimate_s = _estimate_s(status, around)
    timeline = read_timeline(around.history)
    if status.state == "delayed":
        summary = f"{_delayed(status, timeline)}; {_workforce(around)}"
    else:
        summary = _summary(status, around, estimate_s)
    return Explanation(
        status=status,
        summary=summary,
        timeline=timeline,
        workers=around.workers,
        queued=around.queued,
        queued_of_tenant=around.queued_of_tenant,
        running=around.running,
        events=around.events,
        place=around.place,
        estimate_s=estimate_s,
    )


def _estimate_s(status: Status, around: Surroundings) -> float | None:
    """Those who are served first, at the rate at which requests ended of late."""
    if around.place is None or not around.workers or not around.ends_per_s or around.is_paused:
        return None
    before = READY_CLASSES[: READY_CLASSES.index(around.ready_class)]
    ahead = around.place + sum(around.unread[ready_class] for ready_class in before)
    if status.state == "held":
        ahead += around.unread[around.ready_class]
    return (ahead + 1) / around.ends_per_s


def _summary(status: Status, around: Surroundings, estimate_s: float | None) -> str:
    if status.ended:
        why = f" ({status.code}: {status.message})" if status.code else ""
        return f"ended: {status.state}{why}"
    if status.state == "leased":
        alive = "" if status.worker in around.workers else ", which has not been heard of lately"
        return f"attempt {status.attempts} runs on {status.worker}{alive}; {around.events} events"
    estimate = "" if estimate_s is None else f"; about {estimate_s:.3g} s until one takes it"
    return f"{_waiting(status, around)}; {_workforce(around)}{estimate}"


def _waiting(status: Status, around: Surroundings) -> str:
    if status.state == "held":
        return (
            f"waits behind other requests of tenant {status.tenant} "
            f"({_place(around)}, {around.queued_of_tenant} wait), so that other tenants get "
            "their turn"
        )
    again = f" again, after attempt {status.attempts}" if status.attempts else ""
    return (
        f"ready{again} with priority {status.priority}, {_place(around)}, "
        f"{around.queued} requests wait"
    )


def _delayed(status: Status, timeline: Sequence[TimelineEntry]) -> str:
    due_ms = timeline[-1].facts.get("due") if timeline else None
    due = ""
    if isinstance(due_ms, int | float):
        due = f" at {datetime.fromtimestamp(due_ms / 1000, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
    if not status.attempts:
        return f"enters the queue{due}, as it was asked for"
    return (
        f"waits to be tried again{due} ({status.retries} errors reported, "
        f"{status.strikes} workers lost)"
    )


def _place(around: Surroundings) -> str:
    place = around.place or 0
    more = " or more" if place >= LONGEST_LINE else ""
    return f"{place:,}{more} before it" if place else "the next in its line"


def _workforce(around: Surroundings) -> str:
    if around.is_paused:
        return "an operator has paused the queue: nothing new starts until `tokenmill queue resume`"
    if not around.workers:
        return "no worker of this pool is alive: start one"
    count = len(around.workers)
    workers = "1 worker runs" if count == 1 else f"{count} workers run"
    return f"{workers} {around.running} requests"
