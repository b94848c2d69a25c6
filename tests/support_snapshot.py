"""Everything that one pool has in Redis, read while nobody writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

from tokenmill.keys import GROUP, Keyspace

#: A stream's lag when Redis does not know it.
LOST_COUNT = -1

Entries = dict[str, dict[str, str]]


def entry_order(entry_id: str) -> tuple[int, int]:
    """Stream ids in their order."""
    ms, seq = entry_id.split("-")
    return int(ms), int(seq)


@dataclass
class ReadyStream:
    """`lag` is what an autoscaler sees; None before Redis 7."""

    entries: Entries = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)  # entry → consumer
    last_delivered: str = "0-0"
    lag: int | None = None

    def delivered(self, entry_id: str) -> bool:
        return entry_order(entry_id) <= entry_order(self.last_delivered)


@dataclass
class Snapshot:
    """The keyspace, sorted by what keys are for. `ttl_ms` has the lifetimes of records, logs and
    histories, -1 for one that lives for ever."""

    ready: dict[str, ReadyStream]
    records: dict[str, dict[str, str]] = field(default_factory=dict)
    logs: dict[str, Entries] = field(default_factory=dict)
    histories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    backlogs: dict[str, list[str]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    delayed: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    dead_letters: Entries = field(default_factory=dict)
    ttl_ms: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def events(self, request_id: str) -> list[dict[str, Any]]:
        return [json.loads(entry["d"]) for entry in self.logs.get(request_id, {}).values()]

    def ready_entries(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """(ready class, entry id, fields) of every entry."""
        for ready_class, stream in self.ready.items():
            for entry_id, fields in stream.entries.items():
                yield ready_class, entry_id, fields

    def content(self) -> tuple[Any, ...]:
        """What a repeated call must not change: all but lifetimes and idle times."""
        streams = {name: (stream.entries, stream.pending) for name, stream in self.ready.items()}
        of_requests = (self.records, self.logs, self.histories, self.backlogs, self.owners)
        shared = (self.deadlines, self.delayed, self.counters, self.windows, self.weights)
        return (*of_requests, *shared, self.dead_letters, streams)


def take_snapshot(client: redis.Redis, keys: Keyspace, *, lifetimes: bool = True) -> Snapshot:
    """`lifetimes`: whether to ask for those, too."""
    # KEYS is forbidden in production; here it finds some dozens. Sorted, so that a seed repeats.
    names = sorted(client.keys(f"{keys.prefix}*"))
    names = [key for key in names if key.removeprefix(keys.prefix) not in _NO_STATE]
    timed = [key for key in names if lifetimes and _kind(keys, key) in _OF_REQUESTS]
    with client.pipeline(transaction=False) as pipe:
        for key in names:
            _read(pipe, keys, key)
        for key in timed:
            pipe.pttl(key)
        replies = pipe.execute()
    streams = {name: ReadyStream() for name in keys.ready_streams}
    with client.pipeline(transaction=False) as pipe:
        for key in keys.ready_streams.values():
            pipe.xinfo_groups(key)
            pipe.xpending_range(key, GROUP, "-", "+", 10_000)
        groups = pipe.execute()
    for stream, found, pending in zip(streams.values(), groups[::2], groups[1::2], strict=True):
        _read_group(stream, found[0], pending)
    snapshot = Snapshot(ready=streams)
    for key, value in zip(names, replies, strict=False):
        _sort_in(snapshot, key.removeprefix(keys.prefix), value)
    snapshot.ttl_ms = dict(zip(timed, replies[len(names) :], strict=True))
    return snapshot


def _kind(keys: Keyspace, key: str) -> str:
    return key.removeprefix(keys.prefix).partition(":")[0]


def _read(pipe: Any, keys: Keyspace, key: str) -> None:
    match _kind(keys, key):
        case "q" | "t" | "dlq":
            pipe.xrange(key)
        case "z":
            pipe.zrange(key, 0, -1, withscores=True)
        case "b" | "h":
            pipe.lrange(key, 0, -1)
        case "r" | "own" | "cnt" | "win" | "weights":
            pipe.hgetall(key)
        case _:
            pipe.type(key)


def _sort_in(snapshot: Snapshot, name: str, value: Any) -> None:
    kind, _, rest = name.partition(":")
    if name in _SINGLE:
        attribute, convert = _SINGLE[name]
        setattr(snapshot, attribute, convert(value))
    elif kind in _PER_NAME:
        attribute, convert = _PER_NAME[kind]
        getattr(snapshot, attribute)[rest] = convert(value)
    elif kind == "q" and rest in snapshot.ready:
        snapshot.ready[rest].entries = dict(value)
    else:
        snapshot.unknown.append(name)


def _read_group(stream: ReadyStream, group: dict[str, Any], pending: list[dict[str, Any]]) -> None:
    stream.last_delivered = group["last-delivered-id"]
    if "lag" in group:
        stream.lag = LOST_COUNT if group["lag"] is None else group["lag"]
    stream.pending = {one["message_id"]: one["consumer"] for one in pending}


def _counts(counters: dict[str, str]) -> dict[str, int]:
    return {name: int(count) for name, count in counters.items()}


def _lines(history: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in history]


_SINGLE = {
    "own": ("owners", dict),
    "z:dl": ("deadlines", dict),
    "z:delay": ("delayed", dict),
    "cnt": ("counters", _counts),
    "win": ("windows", _counts),
    "weights": ("weights", _counts),
    "dlq": ("dead_letters", dict),
}
_PER_NAME = {
    "r": ("records", dict),
    "t": ("logs", dict),
    "h": ("histories", _lines),
    "b": ("backlogs", list),
}
#: What each request has of its own; only this must not live for ever.
_OF_REQUESTS = {"r", "t", "h"}
#: Bookkeeping of tick, and the memory flag.
_NO_STATE = {"mt", "full"}
