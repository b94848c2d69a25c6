"""Steps of the random walk: time, maintenance, and what goes wrong."""

from __future__ import annotations

from support_invariants import applying_deadlines
from support_walk import WORKERS, Walk
from support_walk_requests import LIVING
from support_walk_workers import take
from tokenmill.calls import AppendEvent
from tokenmill.keys import GROUP
from tokenmill.replies import STORED, Lease, events_if_behind

LONG_AGO_MS = 10_000_000


def pass_deadline(walk: Walk) -> None:
    """One of a request's deadlines passes, perhaps one that no longer applies."""
    names = ("deadline", "queue_deadline", "first_token_deadline")
    deadlines = [
        (request_id, name)
        for request_id, record in walk.snapshot.records.items()
        for name in names
        if record["state"] in LIVING and name in record
    ]
    too_late = [(r, n) for r, n in deadlines if n not in applying_deadlines(walk.snapshot, r)]
    if too_late and walk.random.random() < 0.5:
        deadlines = too_late
    if deadlines:
        request_id, name = walk.random.choice(deadlines)
        past = walk.now_ms() - 1
        walk.client.hset(walk.keys.record(request_id), name, past)
        walk.client.zadd(walk.keys.deadlines, {request_id: past}, lt=True)
        applies = name in applying_deadlines(walk.snapshot, request_id)
        walk.outcomes[f"{name} passed{'' if applies else ', too late'}"] += 1


def tick_after_deadline(walk: Walk) -> None:
    pass_deadline(walk)
    tick(walk)


def take_after_deadline(walk: Walk) -> None:
    pass_deadline(walk)
    for _ in range(3):
        take(walk)


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
    request_id, with_tokens = held[1].request_id, walk.random.random() < 0.5
    for _ in range(walk.random.randrange(1, 6)):
        lease = _lease_of(walk, request_id)
        if lease is None:
            break
        if with_tokens:
            _make_progress(walk, lease)
        if walk.random.random() < 0.3:
            walk.call(walk.calls.hand_over(request_id, lease.fence, reason="no_room"))
        else:
            record = walk.snapshot.records[request_id]
            _age(walk, record["ready"], record["entry"], record["worker"])
            tick(walk)
            walk.client.zadd(walk.keys.delayed, {request_id: 1}, xx=True)
            tick(walk)
        walk.lease(WORKERS[0], walk.read(WORKERS[0], count=10, ready_class="r"))


def _lease_of(walk: Walk, request_id: str) -> Lease | None:
    """The lease under which it runs now, in the middle of a step."""
    walk.check()
    fence = walk.snapshot.owners.get(request_id)
    leases = (lease for _, lease in walk.leases if lease.request_id == request_id)
    return next((lease for lease in leases if lease.fence == fence), None)


def _make_progress(walk: Walk, lease: Lease) -> None:
    """A start event alone is none."""
    assert walk.call(walk.calls.append([walk.events(lease)])) == [STORED]
    walk.check()
    assert walk.call(walk.calls.append([walk.events(lease)])) == [STORED]


def lose_every_reader(walk: Walk) -> None:
    """Whoever reads an entry dies before it leases it."""
    ready_class = walk.random.choice("012")
    for _ in range(walk.random.randrange(1, 4)):
        for entry in walk.read(WORKERS[0], count=2, ready_class=ready_class):
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
        walk.set_clock(last=now - walk.policy.lease_ms)
    else:
        walk.set_clock(reap_after=now + walk.policy.lease_ms)
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
    with_log, seen = walk.random.random() < 0.5, walk.random.random() < 0.5
    walk.forget(request_id, with_log=with_log)
    if with_log and seen:  # by maintenance: that the record is gone
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
        walk.client.delete(walk.keys.log(request_id), walk.keys.history(request_id))
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
