"""What stands in a queue now, read for people: depth by class, tenants, workers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis.exceptions import ResponseError

from tokenmill._link import Home
from tokenmill.keys import GROUP, PRIORITIES, TENANT_COUNTER_PREFIX, Keyspace

#: Ready class → the name people use.
CLASS_NAMES: Final = {"r": "resumed"} | {ready: name for name, ready in PRIORITIES.items()}


@dataclass(frozen=True, slots=True)
class ClassDepth:
    """Requests of one class that no worker has taken yet.

    `ready` can be taken at once; `held` wait for their tenant's window. `oldest_s` is the age of
    the first ready one.
    """

    name: str
    ready: int
    held: int
    oldest_s: float | None

    @classmethod
    def sum_of(cls, same: Sequence[ClassDepth]) -> ClassDepth:
        """Of one class in several partitions."""
        ages = [depth.oldest_s for depth in same if depth.oldest_s is not None]
        return cls(
            same[0].name,
            ready=sum(depth.ready for depth in same),
            held=sum(depth.held for depth in same),
            oldest_s=max(ages, default=None),
        )


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The parts are read one after another: they may differ by what happened in between.

    `ends_per_s`: requests that ended per second of late; None: nobody has measured it. `paused_s`:
    for how long the pool has been paused; None: it is not.
    """

    queued: int
    leased: int
    delayed: int
    dead_letters: int
    classes: tuple[ClassDepth, ...]
    tenants: dict[str, int]
    workers: tuple[dict[str, Any], ...]
    ends_per_s: float | None = None
    paused_s: float | None = None

    @property
    def is_paused(self) -> bool:
        return self.paused_s is not None

    @property
    def oldest_s(self) -> float | None:
        return max(
            (depth.oldest_s for depth in self.classes if depth.oldest_s is not None), default=None
        )

    @classmethod
    def sum_of(cls, parts: Sequence[QueueSnapshot]) -> QueueSnapshot:
        """Of all partitions of a pool; a worker that serves several of them counts once."""
        tenants: Counter[str] = Counter()
        for part in parts:
            tenants.update(part.tenants)
        workers = {card["id"]: card for part in parts for card in part.workers}
        return cls(
            queued=sum(part.queued for part in parts),
            leased=sum(part.leased for part in parts),
            delayed=sum(part.delayed for part in parts),
            dead_letters=sum(part.dead_letters for part in parts),
            classes=tuple(
                ClassDepth.sum_of(same)
                for same in zip(*(part.classes for part in parts), strict=True)
            ),
            tenants=dict(tenants),
            workers=tuple(workers[name] for name in sorted(workers)),
            ends_per_s=_total(part.ends_per_s for part in parts),
            paused_s=max((p.paused_s for p in parts if p.paused_s is not None), default=None),
        )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def read_snapshot(homes: Sequence[Home]) -> QueueSnapshot:
    """Of all partitions of a pool."""
    return QueueSnapshot.sum_of([_read_partition(home.redis, home.keys) for home in homes])


def _read_partition(client: redis.Redis, keys: Keyspace) -> QueueSnapshot:
    counters: dict[str, str] = _text(client.hgetall(keys.counters))
    tenants = {
        field.removeprefix(TENANT_COUNTER_PREFIX): int(count)
        for field, count in counters.items()
        if field.startswith(TENANT_COUNTER_PREFIX)
    }
    rate = _text(client.hget(keys.maintenance, "rate"))
    paused = _text(client.hget(keys.pause, "since"))
    return QueueSnapshot(
        queued=int(counters.get("queued", 0)),
        leased=int(counters.get("leased", 0)),
        delayed=client.zcard(keys.delayed),
        dead_letters=client.xlen(keys.dead_letters),
        classes=tuple(_depths(client, keys, list(tenants))),
        tenants=tenants,
        workers=tuple(read_worker_cards(client, keys)),
        ends_per_s=float(rate) if rate else None,
        paused_s=None if paused is None else max(0.0, _now_ms(client) - int(paused)) / 1000,
    )


def read_worker_cards(client: redis.Redis, keys: Keyspace) -> list[dict[str, Any]]:
    """The cards of the workers that are alive, each with its `id`, in the order of the ids."""
    names: list[str] = sorted(_text(client.scan_iter(match=keys.worker_cards, count=1000)))
    texts = client.mget(names) if names else []
    start = len(keys.worker_card(""))
    return [
        {"id": name[start:], **json.loads(text)}
        for name, text in zip(names, texts, strict=True)
        if text is not None  # expired in between
    ]


def _text(reply: Any) -> Any:
    """redis-py types every reply as text or bytes; our clients decode, so it is text."""
    return reply


def _depths(client: redis.Redis, keys: Keyspace, tenants: list[str]) -> Iterator[ClassDepth]:
    now_ms = _now_ms(client)
    for ready_class, stream in keys.ready_streams.items():
        pending, last_delivered = _group_position(client, stream)
        first = _text(client.xrange(stream, min=f"({last_delivered}", count=1))
        with client.pipeline(transaction=False) as pipeline:
            for tenant in tenants:
                pipeline.llen(keys.backlog(ready_class, tenant))
            held = sum(pipeline.execute())
        yield ClassDepth(
            CLASS_NAMES[ready_class],
            ready=max(client.xlen(stream) - pending, 0),
            held=held,
            oldest_s=(now_ms - int(first[0][0].partition("-")[0])) / 1000 if first else None,
        )


def _now_ms(client: redis.Redis) -> int:
    """By the clock of Redis."""
    seconds, microseconds = _text(client.time())
    return int(seconds * 1000 + microseconds // 1000)


def _group_position(client: redis.Redis, stream: str) -> tuple[int, str]:
    """Entries that are with workers, and the id of the last that was handed out."""
    try:
        groups = client.xinfo_groups(stream)
    except ResponseError:  # no such key: neither a request nor a worker was ever there
        return 0, "0-0"
    for group in groups:
        if group["name"] == GROUP:
            return group["pending"], group["last-delivered-id"]
    return 0, "0-0"
