"""What stands around a request in the queue: which questions to ask Redis, and the answers. No I/O.

`inquire` is a generator: it yields commands, is sent their replies, and returns what it found; the
sync and the async client are two loops around it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ResponseError

from ._status import Status
from .keys import GROUP, TENANT_COUNTER_PREFIX, Keyspace

#: A command for a pipeline, sync or async.
Question = Callable[[Any], Any]
Inquiry = Generator[list[Question], Sequence[Any], "Surroundings"]
#: A worker that asked for work or renewed a lease within so many leases is alive.
ALIVE_LEASES: Final = 3
#: Of those before a request in its line at most so many are counted.
LONGEST_LINE: Final = 1000


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`unread` counts, by ready class, the entries that no worker has read; `ready_class` is that
    of the request's own line, and `place` how many wait before it there (None: it stands in none).
    `ends_per_s` is None when nobody has measured it. `is_paused`: an operator stopped the queue."""

    workers: list[str]
    queued: int
    queued_of_tenant: int
    running: int
    events: int
    history: list[str]
    unread: dict[str, int]
    ready_class: str
    place: int | None
    ends_per_s: float | None
    is_paused: bool


def inquire(keys: Keyspace, status: Status, lease_ms: int) -> Inquiry:
    """Ask about a request. What is sent to it are `answers`."""
    tenant = f"{TENANT_COUNTER_PREFIX}{status.tenant}"
    streams = list(keys.ready_streams.values())
    replies = yield [
        lambda p: p.hmget(keys.counters, ["queued", "leased", tenant]),
        lambda p: p.xlen(keys.log(status.id)),
        lambda p: p.lrange(keys.history(status.id), 0, -1),
        lambda p: p.hget(keys.maintenance, "rate"),
        lambda p: p.exists(keys.pause),
        lambda p: p.hmget(keys.record(status.id), ["class", "ready", "entry"]),
        *(_about_workers(stream) for stream in streams),
        *(_about_group(stream) for stream in streams),
        *(_length_of(stream) for stream in streams),
    ]
    (queued, running, of_tenant), events, history, rate, paused, where, *rest = replies
    consumers, groups, lengths = (
        rest[n : n + len(streams)] for n in range(0, len(rest), len(streams))
    )
    positions = dict(zip(keys.ready_streams, map(_position, groups), strict=True))
    place = yield from _place(keys, status, where, positions)
    return Surroundings(
        workers=_alive(consumers, lease_ms),
        queued=int(queued or 0),
        queued_of_tenant=int(of_tenant or 0),
        running=int(running or 0),
        events=int(events),
        history=history,
        unread={
            ready_class: max(0, length - pending)
            for (ready_class, (pending, _)), length in zip(positions.items(), lengths, strict=True)
        },
        ready_class=where[1] or "r",
        place=place,
        ends_per_s=float(rate) if rate else None,
        is_paused=bool(paused),
    )


def answers(replies: Sequence[Any]) -> list[Any]:
    """The replies of a pipeline that collects errors: an empty list where there is no stream or no
    group yet; any other error is raised."""
    for reply in replies:
        if isinstance(reply, Exception) and not _is_unread_stream(reply):
            raise reply
    return [[] if isinstance(reply, Exception) else reply for reply in replies]


def _place(
    keys: Keyspace,
    status: Status,
    where: Sequence[str | None],
    positions: dict[str, tuple[int, str]],
) -> Generator[list[Question], Sequence[Any], int | None]:
    """Who waits before the request, in its ready stream or in its tenant's own list. Places of
    requests that have ended meanwhile are kept for a while, and do not count."""
    own_class, ready, entry = (value or "" for value in where)
    if status.state == "queued" and entry:
        after = positions[ready][1]
        between = {"min": f"({after}", "max": f"({entry}", "count": LONGEST_LINE}
        (entries,) = yield [lambda p: p.xrange(keys.ready(ready), **between)]
        line = [(fields.get("id", ""), "entry", entry_id) for entry_id, fields in entries]
    elif status.state == "held":
        backlog = keys.backlog(own_class, status.tenant)
        (ids,) = yield [lambda p: p.lrange(backlog, 0, LONGEST_LINE - 1)]
        line = [(request_id, "state", "held") for request_id in ids]
        if status.id in ids:
            line = line[: ids.index(status.id)]
    else:
        return None
    if not line:
        return 0
    found = yield [_field_of(keys.record(request_id), name) for request_id, name, _ in line]
    wanted = [value for _, _, value in line]
    return [value == expected for value, expected in zip(found, wanted, strict=True)].count(True)


def _about_workers(stream: str) -> Question:
    return lambda p: p.xinfo_consumers(stream, GROUP)


def _about_group(stream: str) -> Question:
    return lambda p: p.xinfo_groups(stream)


def _length_of(stream: str) -> Question:
    return lambda p: p.xlen(stream)


def _field_of(record: str, name: str) -> Question:
    return lambda p: p.hget(record, name)


def _is_unread_stream(error: Exception) -> bool:
    """No worker has ever read this stream, or nothing was ever in it."""
    text = str(error)
    return isinstance(error, ResponseError) and ("no such key" in text.lower() or "NOGROUP" in text)


def _position(groups: Iterable[dict[str, Any]]) -> tuple[int, str]:
    """Entries that are with workers, and the last that was handed out."""
    for group in groups:
        if group["name"] == GROUP:
            return int(group["pending"]), str(group["last-delivered-id"])
    return 0, "0-0"


def _alive(consumers_of_streams: Iterable[Iterable[dict[str, Any]]], lease_ms: int) -> list[str]:
    return sorted({
        consumer["name"]
        for consumers in consumers_of_streams
        for consumer in consumers
        if consumer["idle"] <= ALIVE_LEASES * lease_ms
    })  # fmt: skip
