"""The steps of the random walk: everything that may happen to a queue."""

from __future__ import annotations

import json
from collections.abc import Callable

from support_walk import WORKERS, Walk
from tokenmill.calls import AppendEvent
from tokenmill.keys import GROUP
from tokenmill.protocol import TERMINAL_STATES
from tokenmill.ready import read_entries
from tokenmill.replies import LOST, STORED, STORED_BEFORE, Lease, ReadyEntry, events_if_behind

LIVING = ("held", "queued", "delayed", "leased")
LONG_AGO_MS = 10_000_000


# Producers


def enqueue(walk: Walk) -> None:
    request_id, body = walk.new_id(), json.dumps({"prompt": walk.random.randrange(10**6)})
    reply = walk.call(
        walk.calls.enqueue(
            request_id,
            body=body,
            tenant=walk.random.choice("ab"),
            priority_class=walk.random.choice("012"),
        )
    )
    walk.outcomes[f"enqueue {reply.status} {reply.state}{reply.reason}"] += 1
    if reply.status == "OK":
        walk.memory.bodies[request_id] = body


def enqueue_known_id(walk: Walk) -> None:
    request_id = walk.some_id()
    known = walk.memory.bodies.get(request_id or "")
    if request_id is None or known is None:
        return
    same = walk.random.random() < 0.5
    reply = walk.call(walk.calls.enqueue(request_id, body=known if same else known + " "))
    walk.outcomes[f"enqueue {reply.status}"] += 1
    assert reply.status == ("DUP" if same else "CONFLICT")


def enqueue_too_large(walk: Walk) -> None:
    reply = walk.call(walk.calls.enqueue(walk.new_id(), body="x" * 201))
    assert reply.status == "TOO_LARGE"


def xadd_plain(walk: Walk) -> None:
    known = walk.some_id() if walk.random.random() < 0.3 else None
    request_id = known or walk.new_id()
    body = walk.random.choice(["{}", "{}", "{}", walk.memory.bodies.get(request_id), "x" * 201])
    stream = walk.keys.ready(walk.random.choice("012"))
    walk.client.xadd(stream, {"id": request_id, "body": body or "{}", "tenant": "a"})
    walk.memory.plain.add(request_id)


def xadd_junk(walk: Walk) -> None:
    junk: list[dict[str, str]] = [{"x": "y"}, {"id": "no such"}, {"id": "{}", "body": "{}"}]
    known = walk.some_id()
    if known:
        junk.append({"id": known})
    walk.client.xadd(walk.keys.ready("1"), walk.random.choice(junk))


def cancel(walk: Walk) -> None:
    request_id = walk.some_id() or "no such"
    before = walk.snapshot.records.get(request_id, {}).get("state")
    reply = walk.call(walk.calls.cancel(request_id))
    walk.outcomes[f"cancel {reply.cancelled}"] += 1
    assert reply.cancelled == (before in LIVING)
    assert reply.state == ("cancelled" if reply.cancelled else before)


def set_memory_flag(walk: Walk) -> None:
    walk.client.set(walk.keys.memory_flag, "1", px=60_000)


# Workers


def take(walk: Walk) -> None:
    worker = walk.random.choice(WORKERS)
    entries = walk.read(worker, count=2)
    walk.lease(worker, [e for e in entries if e.body is None or walk.admit(e)])


def read_and_die(walk: Walk) -> None:
    for entry in walk.read(walk.random.choice(WORKERS), count=2):
        admitted = entry.body is not None and walk.random.random() < 0.5 and walk.admit(entry)
        if entry.body is None or admitted:
            walk.read_only.append(entry)


def lease_twice_delivered(walk: Walk) -> None:
    """An entry that was read long ago, perhaps superseded, perhaps held by another."""
    if walk.read_only:
        walk.lease(walk.random.choice(WORKERS), [walk.random.choice(walk.read_only)])


def lease_what_another_holds(walk: Walk) -> None:
    held = walk.some_lease()
    if held:
        worker, lease = held
        entry = ReadyEntry(lease.ready_class, lease.entry_id, lease.request_id)
        other = WORKERS[1 - WORKERS.index(worker)]
        (reply,) = walk.call_stale(walk.calls.lease(other, [entry]))
        walk.outcomes[f"lease {reply.code}"] += 1
        assert reply.code == "BUSY"


def append(walk: Walk) -> None:
    chosen = walk.random.sample(walk.leases, k=min(len(walk.leases), 3))
    codes = walk.call(walk.calls.append([walk.events(lease) for _, lease in chosen]))
    assert codes == [STORED] * len(chosen)


def append_stored_or_gap(walk: Walk) -> None:
    held = walk.some_lease()
    if held:
        num_events = walk.num_events(held[1].request_id)
        distance = walk.random.choice([0, 2, 3])
        (code,) = walk.call(walk.calls.append([walk.events(held[1], distance)]))
        if distance == 0:
            assert code == STORED_BEFORE
        else:
            assert events_if_behind(code) == num_events


def append_stale(walk: Walk) -> None:
    if walk.stale:
        _, lease = walk.random.choice(walk.stale)
        (code,) = walk.call_stale(walk.calls.append([walk.events(lease)]))
        assert code == LOST


def heartbeat(walk: Walk) -> None:
    worker = walk.random.choice(WORKERS)
    own = [lease for holder, lease in walk.leases if holder == worker]
    codes = walk.call(walk.calls.heartbeat(worker, own))
    assert codes == [walk.num_events(lease.request_id) for lease in own]
    ready = walk.take().ready
    for lease in own:
        assert ready[lease.ready_class].pending[lease.entry_id] == worker
        walk.memory.aged.discard((lease.ready_class, lease.entry_id))


def heartbeat_stale(walk: Walk) -> None:
    if walk.stale:
        _, lease = walk.random.choice(walk.stale)
        assert walk.call_stale(walk.calls.heartbeat("zombie", [lease])) == [LOST]


def _end(walk: Walk, lease: Lease, distance: int, state: str) -> AppendEvent:
    seq = walk.num_events(lease.request_id) + distance
    end = {"e": seq, "ev": "end", "st": state, "a": lease.attempt}
    if state == "failed":
        end["code"] = "internal"
    return AppendEvent(lease.request_id, lease.fence, seq, json.dumps(end))


def finish(walk: Walk) -> None:
    held = walk.some_lease()
    if not held:
        return
    lease = held[1]
    distance = walk.random.choice([1, 1, 1, 0, 2])
    state = walk.random.choice(["done", "failed"])
    code = "internal" if state == "failed" else ""
    end = _end(walk, lease, distance, state)
    reply = walk.call(walk.calls.finish(end, state=state, code=code))
    walk.outcomes[f"finish {reply.status}"] += 1
    assert reply.status == ("OK" if distance == 1 else "BEHIND")
    if distance == 1:
        again = walk.call(walk.calls.finish(end, state=state, code=code))
        assert (again.status, again.state) == ("DUP", state)
    else:
        assert reply.num_events == walk.num_events(lease.request_id)


def finish_stale(walk: Walk) -> None:
    if walk.stale:
        _, lease = walk.random.choice(walk.stale)
        end = _end(walk, lease, 1, "done")
        reply = walk.call_stale(walk.calls.finish(end))
        walk.outcomes[f"finish {reply.status}"] += 1
        record = walk.snapshot.records.get(lease.request_id, {})
        own_end = record.get("state") in TERMINAL_STATES and _is_last(lease, record)
        assert reply.status == ("DUP" if own_end else "LOST")


def _is_last(lease: Lease, record: dict[str, str]) -> bool:
    return lease.fence == f"{record['attempts']}.{record['created']}"


def hand_over(walk: Walk) -> None:
    held = walk.some_lease()
    if held:
        lease = held[1]
        reply = walk.call(walk.calls.hand_over(lease.request_id, lease.fence))
        assert (reply.status, reply.state) == ("OK", "queued")


def retry_later(walk: Walk) -> None:
    held = walk.some_lease()
    if held:
        lease = held[1]
        tried = int(walk.snapshot.records[lease.request_id]["retries"])
        delay_ms = walk.random.choice([0, 50_000])
        reply = walk.call(
            walk.calls.retry_later(
                lease.request_id, lease.fence, delay_ms=delay_ms, message="out of memory"
            )
        )
        walk.outcomes[f"release {reply.status} {reply.state}"] += 1
        assert reply.state == ("failed" if tried == 2 else "delayed" if delay_ms else "queued")


def release_stale(walk: Walk) -> None:
    if walk.stale:
        _, lease = walk.random.choice(walk.stale)
        reply = walk.call_stale(walk.calls.hand_over(lease.request_id, lease.fence))
        assert reply.status == "LOST"


# Time and mishaps


def pass_deadline(walk: Walk) -> None:
    request_id = walk.some_id(*LIVING)
    if request_id:
        past = walk.now_ms() - 1
        walk.client.hset(walk.keys.record(request_id), "deadline", past)
        walk.client.zadd(walk.keys.deadlines, {request_id: past})


def pass_delay(walk: Walk) -> None:
    request_id = walk.some_id("delayed")
    if request_id:
        walk.client.zadd(walk.keys.delayed, {request_id: walk.now_ms() - 1})


def _age(walk: Walk, ready_class: str, entry: str, consumer: str) -> None:
    """Its reader or holder has been silent for longer than a lease."""
    stream = walk.keys.ready(ready_class)
    walk.client.xclaim(stream, GROUP, consumer, 0, [entry], idle=LONG_AGO_MS, justid=True)
    walk.memory.aged.add((ready_class, entry))


def age_pending(walk: Walk) -> None:
    pending = [
        (ready_class, entry, consumer)
        for ready_class, stream in walk.snapshot.ready.items()
        for entry, consumer in stream.pending.items()
    ]
    if pending:
        _age(walk, *walk.random.choice(pending))


def lose_every_worker(walk: Walk) -> None:
    """A request kills each worker that leases it, perhaps after a token."""
    held = walk.some_lease()
    if not held:
        return
    request_id = held[1].request_id
    for _ in range(walk.random.randrange(1, 4)):
        record = walk.client.hgetall(walk.keys.record(request_id))
        if record["state"] != "leased":
            break
        _age(walk, record["ready"], record["entry"], record["worker"])
        tick(walk)
        walk.client.zadd(walk.keys.delayed, {request_id: 1}, xx=True)
        tick(walk)
        reply = walk.client.xreadgroup(GROUP, WORKERS[0], {walk.keys.ready("r"): ">"})
        walk.lease(WORKERS[0], read_entries(walk.keys, reply))


def lose_every_reader(walk: Walk) -> None:
    """Whoever reads an entry dies before it leases it."""
    for _ in range(walk.random.randrange(1, 4)):
        for entry in walk.read(WORKERS[0], count=2):
            _age(walk, entry.ready_class, entry.entry_id, WORKERS[0])
        tick(walk)


def tick(walk: Walk) -> None:
    walk.client.delete(walk.keys.memory_flag)  # its lifetime is over
    walk.set_clock()
    walk.tick()


def tick_in_grace(walk: Walk) -> None:
    """Nobody ticked for a while, or the grace that this began is not over."""
    now = walk.now_ms()
    if walk.random.random() < 0.5:
        walk.set_clock(last=now - 60_000)
    else:
        walk.set_clock(reap_after=now + 60_000)
    walk.tick()


def tick_after_lost_pending(walk: Walk) -> None:
    """A lease lost its pending entry, as in a failover: the tidying finds it."""
    held = walk.some_lease()
    if held:
        lease = held[1]
        walk.client.xack(walk.keys.ready(lease.ready_class), GROUP, lease.entry_id)
        walk.memory.aged.add((lease.ready_class, lease.entry_id))
    walk.set_clock(tidied=0)
    walk.tick()


def tick_after_vanished(walk: Walk) -> None:
    """Nobody ticked until records had outlived deadline and retention."""
    for _ in range(walk.random.randrange(3)):
        request_id = walk.some_id(*LIVING)
        if request_id:
            walk.forget(request_id)
            walk.client.zadd(walk.keys.deadlines, {request_id: 1})
    walk.set_clock()
    walk.tick()


def use_id_again(walk: Walk) -> None:
    """Redis lost a record while a worker holds it, and the client enqueues once more.

    Sometimes another worker has taken that by the time the first one writes.
    """
    held = walk.some_lease()
    if not held:
        return
    request_id, body = held[1].request_id, held[1].body
    walk.forget(request_id, with_log=walk.random.random() < 0.5)
    if walk.random.random() < 0.5:  # maintenance has seen that it is gone, or has not
        walk.client.zadd(walk.keys.deadlines, {request_id: 1})
        walk.set_clock()
        walk.tick()
    walk.await_next_ms()  # two births in one millisecond cannot be told apart
    reply = walk.call(walk.calls.enqueue(request_id, body=body, tenant="b"))
    walk.outcomes[f"used again {reply.status}"] += 1
    if reply.status == "OK":
        walk.memory.bodies[request_id] = body
    else:
        walk.client.zadd(walk.keys.deadlines, {request_id: 1})
        walk.client.delete(walk.keys.log(request_id))
    walk.set_clock()
    walk.tick()
    if walk.random.random() < 0.7:
        take(walk)


def lose_end_of_log(walk: Walk) -> None:
    """A failover lost the last events; the holder appends them again."""
    held = walk.some_lease()
    num_events = walk.num_events(held[1].request_id) if held else 0
    if not held or num_events == 0:
        return
    lease = held[1]
    log = walk.keys.log(lease.request_id)
    kept = walk.random.randrange(num_events)
    entries = list(walk.snapshot.logs[lease.request_id].items())
    walk.client.delete(log)
    for entry, fields in entries[:kept]:
        walk.client.xadd(log, fields, id=entry)
    if kept:
        walk.client.pexpire(log, 50_000)
    payloads = [fields["d"] for _, fields in entries]
    (code,) = walk.call(walk.calls.append([walk.events(lease)]))
    assert events_if_behind(code) == kept
    for seq in range(kept + 1, num_events + 1):
        event = AppendEvent(lease.request_id, lease.fence, seq, payloads[seq - 1])
        assert walk.call(walk.calls.append([event])) == [STORED]
    del walk.snapshot.logs[lease.request_id]  # the repaired events are published once more
    for entry, fields in entries[:kept]:
        walk.snapshot.logs.setdefault(lease.request_id, {})[entry] = fields


STEPS: dict[str, tuple[int, Callable[[Walk], None]]] = {
    step.__name__: (weight, step)
    for weight, step in (
        (8, enqueue), (2, enqueue_known_id), (1, enqueue_too_large), (4, xadd_plain),
        (2, xadd_junk), (3, cancel), (1, set_memory_flag), (9, take), (3, read_and_die),
        (3, lease_twice_delivered), (1, lease_what_another_holds), (8, append),
        (2, append_stored_or_gap), (3, append_stale), (3, heartbeat), (3, heartbeat_stale),
        (4, finish), (2, finish_stale), (2, hand_over), (5, retry_later), (1, release_stale),
        (2, pass_deadline), (2, pass_delay), (6, age_pending), (6, tick), (2, tick_in_grace),
        (1, tick_after_lost_pending), (1, tick_after_vanished), (2, use_id_again),
        (1, lose_end_of_log), (2, lose_every_worker), (2, lose_every_reader),
    )
}  # fmt: skip
_NAMES = list(STEPS)
_WEIGHTS = [weight for weight, _ in STEPS.values()]


def random_step(walk: Walk) -> None:
    (name,) = walk.random.choices(_NAMES, _WEIGHTS)
    walk.step(name, STEPS[name][1])
