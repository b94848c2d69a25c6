"""The queue itself: does anybody serve it, does maintenance run, is anything stuck or given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from redis.exceptions import ResponseError

from tokenmill._link import Home
from tokenmill.cli.partitions import text
from tokenmill.cli.tables import age
from tokenmill.dead_letters import DeadLetter
from tokenmill.keys import GROUP, PARTITIONS_FIELD, PROTOCOL_FIELD
from tokenmill.pool_meta import PROTOCOL

from .finding import Finding
from .subject import Subject

#: A worker ticks every fifth of a lease; beyond this nobody does.
MAINTENANCE_LATE_S: Final = 60.0
#: Pending entries that nobody has touched for so many leases were not reclaimed.
STALE_LEASES: Final = 3
LONG_WAIT_S: Final = 60.0
QUEUE_FULL_SHARE: Final = 0.8
START_ONE: Final = "start one with `tokenmill worker`, for this --namespace and --pool"


def check_workers(subject: Subject) -> Iterator[Finding]:
    snapshot = subject.snapshot
    states = [str(card.get("state")) for card in snapshot.workers]
    evidence = f"worker cards: {len(states)} ({', '.join(sorted(set(states))) or 'none'}); "
    evidence += f"{snapshot.queued} queued, {snapshot.leased} running"
    if not states:
        yield Finding(
            severity="error" if snapshot.queued else "warning",
            check="workers",
            problem="requests wait and no worker is alive in this pool"
            if snapshot.queued
            else "no worker is alive in this pool",
            evidence=evidence,
            way_out=START_ONE,
        )
    elif "ready" not in states:
        yield Finding(
            severity="warning",
            check="workers",
            problem="no worker of this pool is ready",
            evidence=evidence,
            way_out="wait until one has loaded its model; its log and /readyz say how far it is",
        )
    elif (snapshot.oldest_s or 0) > LONG_WAIT_S and not snapshot.is_paused:
        yield Finding(
            severity="warning",
            check="backlog",
            problem=f"the oldest ready request has waited {age(snapshot.oldest_s)}",
            evidence=evidence,
            way_out="start more workers; `tokenmill top` shows whether those there are full",
        )


def check_partitions(subject: Subject) -> Iterator[Finding]:
    if not subject.snapshot.workers:
        return
    for home in subject.homes:
        if next(home.redis.scan_iter(match=home.keys.worker_cards, count=1000), None) is None:
            yield Finding(
                severity="error",
                check="partitions",
                problem=f"no worker serves partition {home.keys.partition}",
                evidence=f"no key {home.keys.worker_cards}",
                way_out="leave --serve-partitions out, or start a worker that names this one",
            )


def check_models(subject: Subject) -> Iterator[Finding]:
    """One pool, one model; one release except while workers are replaced."""
    cards = subject.snapshot.workers
    models = sorted({str(card.get("model")) for card in cards})
    if len(models) > 1:
        yield Finding(
            severity="error",
            check="models",
            problem="the workers of this pool serve different models: who answers is chance",
            evidence=f"worker cards: {', '.join(models)}",
            way_out="give each model a --pool of its own, or all workers one --served-model-name "
            "if they are the same",
        )
    versions = sorted({str(card.get("versions", {}).get("tokenmill")) for card in cards})
    if len(versions) > 1:
        yield Finding(
            severity="note",
            check="versions",
            problem="workers of different releases serve this pool",
            evidence=f"worker cards: {', '.join(versions)}",
            way_out="finish the update: see docs/operations.md, Upgrading",
        )


def check_protocol(subject: Subject) -> Iterator[Finding]:
    home = subject.homes[0]
    meta: dict[str, str] = (
        text(home.redis.hgetall(home.keys.meta)) if not subject.is_cluster else {}
    )
    protocol = meta.get(PROTOCOL_FIELD, PROTOCOL)
    if protocol != PROTOCOL:
        yield Finding(
            severity="error",
            check="protocol",
            problem=f"this pool speaks protocol {protocol}, this release speaks {PROTOCOL}",
            evidence=f"HGETALL {home.keys.meta}: protocol {protocol}, "
            f"partitions {meta.get(PARTITIONS_FIELD, '1')}",
            way_out="use the release that the workers have, or another pool",
        )


def check_pause(subject: Subject) -> Iterator[Finding]:
    snapshot = subject.snapshot
    if snapshot.is_paused:
        yield Finding(
            severity="warning",
            check="paused",
            problem="an operator has paused this pool: nothing new starts",
            evidence=f"paused for {age(snapshot.paused_s)}; {snapshot.queued} requests wait",
            way_out="`tokenmill queue resume`, if whoever paused it agrees",
        )


def check_maintenance(subject: Subject) -> Iterator[Finding]:
    for home in subject.homes:
        last: str | None = text(home.redis.hget(home.keys.maintenance, "last"))
        if last is None or not subject.snapshot.workers:
            continue  # without workers nobody ticks, and that is a finding of its own
        late_s = _now_s(home) - int(last) / 1000
        if late_s > MAINTENANCE_LATE_S:
            yield Finding(
                severity="error",
                check="maintenance",
                problem="nobody looks after deadlines, retries and lost workers",
                evidence=f"the last tick of partition {home.keys.partition} was {age(late_s)} ago",
                way_out='see the workers\' logs (and tokenmill_redis_retries{call="tick"}); '
                "restart one of them",
            )


def check_lag(subject: Subject) -> Iterator[Finding]:
    """Redis loses count of a group's lag when an unread entry is deleted; autoscalers read it."""
    for home in subject.homes:
        for stream in home.keys.ready_streams.values():
            for group in _groups(home, stream):
                unread = int(text(home.redis.xlen(stream))) - group["pending"]
                if "lag" in group and group["lag"] != unread:
                    yield Finding(
                        severity="warning",
                        check="lag",
                        problem="the lag of a ready stream is wrong: an autoscaler that reads it "
                        "sleeps or never lets go",
                        evidence=f"XINFO GROUPS {stream}: lag {group['lag']}, but {unread} unread",
                        way_out="a running worker repairs it within seconds; else: nobody ticks",
                    )


def check_pending(subject: Subject) -> Iterator[Finding]:
    for home in subject.homes:
        idle_ms = STALE_LEASES * home.calls.policy.lease_ms
        stale = 0
        for stream in home.keys.ready_streams.values():
            if _groups(home, stream):
                found: Any = home.redis.xpending_range(stream, GROUP, "-", "+", 100, idle=idle_ms)
                stale += len(found)
        if stale:
            yield Finding(
                severity="error",
                check="leases",
                problem="leases of lost workers are not taken back",
                evidence=f"XPENDING: {stale} entries untouched for more than {idle_ms // 1000} s "
                f"in partition {home.keys.partition}",
                way_out="any running worker takes them back within two leases: " + START_ONE,
            )


def check_dead_letters(subject: Subject) -> Iterator[Finding]:
    letters = [
        letter
        for home in subject.homes
        for letter in DeadLetter.parse_all(
            text(home.redis.xrevrange(home.keys.dead_letters, count=1))
        )
    ]
    if not letters:
        return
    latest = max(letters, key=lambda letter: letter.died_ms)
    gone_s = _now_s(subject.homes[0]) - latest.died_ms / 1000
    yield Finding(
        severity="warning",
        check="dead-letters",
        problem=f"{subject.snapshot.dead_letters} requests were given up",
        evidence=f"the latest, {latest.request_id}, {age(max(0.0, gone_s))} ago: {latest.why} "
        f"after {latest.attempts} attempts, last on {latest.worker}",
        way_out=f"`tokenmill dlq show {latest.request_id}`, then `dlq requeue` or `dlq purge`",
    )


def check_queue_room(subject: Subject) -> Iterator[Finding]:
    for home in subject.homes:
        queued = int(text(home.redis.hget(home.keys.counters, "queued")) or 0)
        most = home.calls.policy.max_queued
        if queued > QUEUE_FULL_SHARE * most:
            yield Finding(
                severity="warning",
                check="queue-room",
                problem="the queue is nearly full: producers are refused soon (QueueFull)",
                evidence=f"{queued} queued of {most} in partition {home.keys.partition}",
                way_out="start more workers, or `tokenmill queue purge` what nobody wants any more",
            )


def _groups(home: Home, stream: str) -> list[dict[str, Any]]:
    try:
        groups: list[dict[str, Any]] = text(home.redis.xinfo_groups(stream))
    except ResponseError:  # no such key: nothing was ever there
        return []
    return [group for group in groups if group["name"] == GROUP]


def _now_s(home: Home) -> float:
    seconds, microseconds = text(home.redis.time())
    return float(seconds + microseconds / 1e6)
