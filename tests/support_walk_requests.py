"""Steps of the random walk: what producers and operators do."""

from __future__ import annotations

import json
from typing import Any

from support_walk import WORKERS, Walk
from tokenmill.dead_letters import DeadLetter
from tokenmill.operator_calls import Waiting
from tokenmill.scripts import run

LIVING = ("held", "queued", "delayed", "leased")


def enqueue(walk: Walk) -> None:
    _enqueue(walk)


def enqueue_for_later(walk: Walk) -> None:
    _enqueue(walk, delay_ms=400_000)


def crowd(walk: Walk) -> None:
    """A tenant fills its window; then that becomes wider, or narrower before it has emptied."""
    tenant, priority_class = walk.random.choice("ab"), walk.random.choice("012")
    weight, later = walk.random.choice([(2, 1), (1, 2), (1, 3)])
    walk.call(walk.operator.set_weight(tenant, weight))
    for _ in range(5):
        _enqueue(walk, tenant=tenant, priority_class=priority_class)
    walk.check()
    if walk.random.random() < 0.7:
        walk.call(walk.operator.set_weight(tenant, later))
        walk.check()
        walk.lease(WORKERS[0], walk.read_and_admit(WORKERS[0], 2, priority_class))


def _enqueue(walk: Walk, **options: Any) -> None:
    """With further deadlines now and then; `pass_deadline` lets them pass."""
    request_id, body = walk.new_id(), json.dumps({"prompt": walk.random.randrange(10**6)})
    for name in ("queue_deadline_ms", "first_token_deadline_ms"):
        if walk.random.random() < 0.3:
            options[name] = walk.random.choice([600_000, 900_000])
    reply = walk.call(
        walk.calls.enqueue(
            request_id,
            body=body,
            **{"tenant": walk.random.choice("ab"), "priority_class": walk.random.choice("012")}
            | options,
        )
    )
    walk.outcomes[f"enqueue {reply.status} {reply.state}{reply.reason}"] += 1
    if reply.status == "OK":
        assert (reply.state == "delayed") == ("delay_ms" in options)
        walk.memory.bodies[request_id] = body


def enqueue_known_id(walk: Walk) -> None:
    request_id = walk.some_id()
    known = walk.memory.bodies.get(request_id or "")
    if request_id is None or known is None:
        return
    if not walk.snapshot.records[request_id]["sha"]:
        return  # a plain XADD that no worker admitted, dead and queued again: nobody knows its sha
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
    walk.client.set(walk.keys.memory_flag, "1", px=600_000)


def change_weight(walk: Walk) -> None:
    tenant, weight = walk.random.choice("ab"), walk.random.choice([1, 1, 1, 3])
    before = walk.snapshot.weights.get(tenant, 1)
    assert walk.call(walk.operator.set_weight(tenant, weight)) == before
    walk.outcomes[f"weight {'raised' if weight > before else 'set'}"] += 1


def pause(walk: Walk) -> None:
    """An operator stops the queue; workers that have read entries may lease none of them."""
    walk.call(walk.operator.set_pause("pause"))
    before = set(walk.snapshot.owners)
    for worker in WORKERS:
        walk.lease(worker, walk.read_and_admit(worker, 2))
    assert set(walk.take().owners) <= before, "leased while paused"
    assert run(walk.client, walk.operator.set_pause("resume")) > 0
    walk.outcomes["paused"] += 1


def move(walk: Walk) -> None:
    """Some of all, whatever their state, and one that nobody knows."""
    known = [*walk.snapshot.records]
    held = [name for name in known if walk.snapshot.records[name]["state"] == "held"]
    some = [*walk.random.sample(known, k=min(len(known), 3)), *held[:1], "no such"]
    ids = list(dict.fromkeys(some))
    to = walk.random.choice("012")
    codes = walk.call(walk.operator.move(ids, to))
    after = walk.take().records
    for request_id, code in zip(ids, codes, strict=True):
        walk.outcomes[f"move {code}"] += 1
        before = walk.snapshot.records.get(request_id)
        if before is None or before["state"] not in LIVING[:3]:
            assert code == ("UNKNOWN" if before is None else "TAKEN")
            continue
        assert (after[request_id]["class"], code == "SAME") == (to, before["class"] == to)
        # The window of the new class may be fuller than that of the old one, or less full.
        delayed = before["state"] == "delayed"
        assert after[request_id]["state"] in ({"delayed"} if delayed else {"queued", "held"})


def cancel_waiting(walk: Walk) -> None:
    """An operator purges one tenant's requests of one class, by a list that may be old."""
    meant = Waiting(walk.random.choice("012"), walk.random.choice("ab"))
    records = walk.snapshot.records
    ids = walk.random.sample([*records], k=min(len(records), 6))
    expected = {
        name
        for name in ids
        if (records[name]["class"], records[name]["tenant"]) == (meant.ready_class, meant.tenant)
        and records[name]["state"] in LIVING[:3]
    }
    assert walk.call(walk.operator.cancel_waiting(ids, meant, message="purged")) == len(expected)
    after = walk.take().records
    ended = {name for name in ids if after[name].get("message") == "purged"}
    assert expected == ended - {name for name in ids if records[name].get("message") == "purged"}
    walk.outcomes["cancel_waiting"] += len(expected)


def requeue_dead(walk: Walk) -> None:
    """An operator queues a dead letter again, or mistakes a request for dead."""
    request_id = walk.some_id("dead") or walk.some_id()
    if request_id is None or walk.random.random() < 0.1:
        request_id = "no such"
    record = walk.snapshot.records.get(request_id, {})
    reply = walk.call(walk.operator.requeue_dead(request_id))
    walk.outcomes[f"requeue_dead {reply.status}"] += 1
    if record.get("state") != "dead":
        assert (reply.status, reply.state) == (
            ("NOT_DEAD", record["state"]) if record else ("UNKNOWN", "")
        )
    elif not record.get("body"):
        assert (reply.status, reply.state) == ("NO_BODY", "dead")
    else:
        assert reply.status == "OK"
        assert reply.created_ms > int(record["created"])
        assert record["letter"] not in walk.take().dead_letters
        walk.revive(request_id, record["body"])


def purge(walk: Walk) -> None:
    letters = DeadLetter.parse_all(walk.snapshot.dead_letters.items())
    chosen = walk.random.sample(letters, k=min(len(letters), 2))
    removed = walk.call(walk.operator.purge(chosen))
    assert removed == len(chosen)
    for letter in chosen:
        record = walk.snapshot.records.get(letter.request_id, {})
        if record.get("letter") == letter.entry_id:
            walk.outcomes["purge"] += 1
            assert letter.request_id not in walk.take().records
            walk.forget(letter.request_id)
