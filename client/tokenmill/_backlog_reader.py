"""Reading how much work a pool has, from Redis alone: it must be known while no worker runs.

Counts and sizes only: a few calls for each partition whatever stands in the queue, and no record or
log is touched. The parts are read one after another and may differ by what happened in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from ._backlog import CAPACITY_FIELD, ClassReading, MemoryReading, PoolReading
from ._work import estimate_tokens
from .keys import GROUP, READY_CLASSES, TENANT_COUNTER_PREFIX, Keyspace

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

#: Field of the hash of maintenance: requests that end per second.
RATE_FIELD: Final = "rate"
#: Field of the hash of counters: tokens of requests that stand in the set of delayed ones.
DELAYED_TOKENS_FIELD: Final = "delayed_tokens"
#: Undelivered entries of a class that are looked at for those by plain XADD, which have no record
#: and count nowhere until a worker admits them. Of more, these are taken as a sample.
PLAIN_LOOK: Final = 256


def read_pool(homes: Sequence[tuple[Redis, Keyspace]]) -> PoolReading:
    """Read every partition; raises what redis-py raises."""
    pool = PoolReading()
    for client, keys in homes:
        _PartitionReader(client, keys, pool).read()
    servers = {id(client): client for client, _ in homes}
    memories = [found for client in servers.values() if (found := _read_memory(client))]
    pool.memory = max(memories, key=lambda memory: memory.fullness, default=None)
    return pool


def _read_memory(client: Redis) -> MemoryReading | None:
    """None: this user or server does not tell, which is no reason to say nothing of the queue."""
    try:
        told: Any = client.info("memory")
    except ResponseError:
        return None
    return MemoryReading(int(told["used_memory"]), int(told.get("maxmemory", 0)))


class _PartitionReader:
    """Adds one partition to `pool`, in five round trips at most."""

    def __init__(self, client: Redis, keys: Keyspace, pool: PoolReading) -> None:
        self._client = client
        self._keys = keys
        self._pool = pool

    def read(self) -> None:
        keys, pool = self._keys, self._pool
        waiting_tokens_before = pool.waiting_tokens
        counters, maintenance, delayed, letters, flag, paused, moment, workers, *streams = (
            self._ask(
                lambda p: p.hgetall(keys.counters),
                lambda p: p.hmget(keys.maintenance, [RATE_FIELD, CAPACITY_FIELD]),
                lambda p: p.zcard(keys.delayed),
                lambda p: p.xlen(keys.dead_letters),
                lambda p: p.get(keys.memory_flag),
                lambda p: p.hget(keys.pause, "since"),
                lambda p: p.time(),
                lambda p: p.xinfo_consumers(keys.ready(READY_CLASSES[0]), GROUP),
                *(
                    question
                    for stream in keys.ready_streams.values()
                    for question in (_length(stream), _groups(stream))
                ),
            )
        )
        rate, speed = maintenance
        pool.queued += int(counters.get("queued", 0))
        pool.leased += int(counters.get("leased", 0))
        pool.queued_tokens += int(counters.get("queued_tokens", 0))
        pool.leased_tokens += int(counters.get("leased_tokens", 0))
        pool.dead_letters += letters
        pool.memory_pressure |= flag is not None
        pool.is_paused |= paused is not None
        pool.ends_per_s += float(rate or 0)
        pool.last_speed = float(speed) if speed else pool.last_speed
        positions = [_Position.of(*pair) for pair in zip(streams[::2], streams[1::2], strict=True)]
        now_s = moment[0] + moment[1] / 1e6
        self._read_classes(positions, _tenants(counters), now_s)
        self._read_cards([consumer["name"] for consumer in workers or ()])
        not_due_tokens = self._read_delayed(counters, delayed, now_s) if delayed else 0
        here_tokens = pool.waiting_tokens - waiting_tokens_before
        pool.deferred_tokens += here_tokens if paused is not None else not_due_tokens

    def _read_delayed(self, counters: dict[str, str], delayed: int, now_s: float) -> int:
        """The tokens of requests whose time has not come. One whose time has come waits like any
        other, also while there is no worker to put it into its line; of how many tokens it has
        nothing is known but the mean of all that are delayed."""
        now_ms = int(now_s * 1000)
        (not_due,) = self._ask(lambda p: p.zcount(self._keys.delayed, f"({now_ms}", "+inf"))
        self._pool.delayed += not_due
        share: float = min(1.0, not_due / delayed)
        return round(int(counters.get(DELAYED_TOKENS_FIELD, 0)) * share)

    def _read_classes(
        self, positions: Sequence[_Position], tenants: Sequence[str], now_s: float
    ) -> None:
        keys = self._keys
        firsts = self._ask(
            *(
                _range(keys.ready(name), position, 1)
                for name, position in zip(READY_CLASSES, positions, strict=True)
            )
        )
        held = self._ask(
            *(_llen(keys.backlog(name, tenant)) for name in READY_CLASSES for tenant in tenants)
        )
        per_class = len(tenants)
        for number, name in enumerate(READY_CLASSES):
            position, first = positions[number], firsts[number]
            self._pool.classes[name].add(
                ClassReading(
                    ready=position.undelivered,
                    held=sum(held[number * per_class : (number + 1) * per_class]),
                    pending=position.pending,
                    lag=position.lag,
                    # A producer may choose the id of its entry, also one from the future.
                    oldest_s=max(0.0, now_s - _made_s(first[0])) if first else 0.0,
                )
            )
            if position.undelivered:
                self._read_plain(keys.ready(name), position)

    def _read_plain(self, stream: str, position: _Position) -> None:
        (entries,) = self._ask(_range(stream, position, PLAIN_LOOK))
        bodies = [fields["body"] for _, fields in entries or () if "body" in fields]
        if bodies:
            scale = max(1.0, position.undelivered / len(entries))
            self._pool.plain += round(len(bodies) * scale)
            self._pool.plain_tokens += round(sum(map(estimate_tokens, bodies)) * scale)

    def _read_cards(self, workers: Sequence[str]) -> None:
        texts = self._ask(*(_get(self._keys.worker_card(worker)) for worker in workers))
        for worker, text in zip(workers, texts, strict=True):
            if text is not None:  # else it is gone, and its name will be removed
                self._pool.cards[worker] = json.loads(text)

    def _ask(self, *questions: Callable[[Pipeline], object]) -> list[Any]:
        """The answers, in one round trip; None where there is no such key or group yet."""
        if not questions:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for question in questions:
            question(pipeline)
        return list(map(_or_none, pipeline.execute(raise_on_error=False)))


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the workers' group stands in a ready stream."""

    undelivered: int
    pending: int
    lag: int
    last_delivered: str

    @classmethod
    def of(cls, length: int | None, groups: Sequence[dict[str, Any]] | None) -> _Position:
        group = next((group for group in groups or () if group["name"] == GROUP), None)
        if group is None:
            return cls(length or 0, 0, length or 0, "0-0")
        undelivered = max((length or 0) - group["pending"], 0)
        lag = group.get("lag")
        lag = undelivered if lag is None else lag
        return cls(undelivered, group["pending"], lag, group["last-delivered-id"])


def _or_none(answer: Any) -> Any:
    if isinstance(answer, ResponseError) and str(answer).startswith(("no such key", "NOGROUP")):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _length(stream: str) -> Callable[[Pipeline], object]:
    return lambda pipeline: pipeline.xlen(stream)


def _groups(stream: str) -> Callable[[Pipeline], object]:
    return lambda pipeline: pipeline.xinfo_groups(stream)


def _llen(key: str) -> Callable[[Pipeline], object]:
    return lambda pipeline: pipeline.llen(key)


def _get(key: str) -> Callable[[Pipeline], object]:
    return lambda pipeline: pipeline.get(key)


def _range(stream: str, position: _Position, count: int) -> Callable[[Pipeline], object]:
    return lambda pipeline: pipeline.xrange(stream, f"({position.last_delivered}", count=count)


def _tenants(counters: dict[str, str]) -> list[str]:
    prefix = TENANT_COUNTER_PREFIX
    return [name.removeprefix(prefix) for name in counters if name.startswith(prefix)]


def _made_s(entry: tuple[str, dict[str, str]]) -> float:
    return int(entry[0].partition("-")[0]) / 1000
