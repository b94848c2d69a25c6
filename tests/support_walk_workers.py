"""Steps of the random walk: what workers do, also those that lost their lease."""

from __future__ import annotations

import json

from support_walk import WORKERS, Walk
from tokenmill.calls import AppendEvent
from tokenmill.protocol import TERMINAL_STATES
from tokenmill.replies import LOST, STORED, STORED_BEFORE, Lease, ReadyEntry, events_if_behind


def take(walk: Walk) -> None:
    worker = walk.random.choice(WORKERS)
    walk.lease(worker, walk.read_and_admit(worker, count=3))


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
        lease, facts = held[1], walk.random.choice(["", '{"tokens": 3}'])
        reason = walk.random.choice(["drain", "no_room"])
        reply = walk.call(
            walk.calls.hand_over(lease.request_id, lease.fence, reason=reason, facts=facts)
        )
        assert (reply.status, reply.state) == ("OK", "queued")
        (line,) = [
            line
            for line in walk.take().histories[lease.request_id][-2:]
            if line["ev"] == "handed_over"
        ]
        assert line["why"] == reason
        assert line.get("facts") == (json.loads(facts) if facts else None)


def retry_later(walk: Walk) -> None:
    held = walk.some_lease()
    if held:
        lease = held[1]
        tried = int(walk.snapshot.records[lease.request_id]["retries"])
        delay_ms = walk.random.choice([0, 500_000])
        reply = walk.call(
            walk.calls.retry_later(
                lease.request_id, lease.fence, delay_ms=delay_ms, message="out of memory"
            )
        )
        walk.outcomes[f"release {reply.status} {reply.state}"] += 1
        assert reply.state == (
            "failed" if tried == walk.policy.max_retries else "delayed" if delay_ms else "queued"
        )


def release_stale(walk: Walk) -> None:
    if walk.stale:
        _, lease = walk.random.choice(walk.stale)
        reply = walk.call_stale(walk.calls.hand_over(lease.request_id, lease.fence))
        assert reply.status == "LOST"
