"""Deadlines of the queue, of the first token and of the end, in every state; and delays."""

from __future__ import annotations

import pytest

from support_queue import POLICY, Queue
from tokenmill.replies import LOST, STORED

TOTAL = "the deadline passed"
QUEUE = "the queue deadline passed before a worker took the request"
FIRST_TOKEN = "the first-token deadline passed before the first token"


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def ended_with(queue, message, request_id="a"):
    record, end = queue.record(request_id), queue.end(request_id)
    assert (record.state, record.code) == ("expired", "deadline_exceeded")
    assert (end.status, end.code, end.message) == ("expired", "deadline_exceeded", message)
    return record.message == message


def bring_to(queue, stage, **options):
    """A request "a" in that state, its lease if it has one."""
    if stage == "held":
        for other in ("x", "y"):
            queue.enqueue(other)
    queue.enqueue("a", delay_ms=60_000 if stage == "not before" else 0, **options)
    lease = None
    if stage in ("leased", "retried", "given back"):
        (lease,) = queue.lease()
    if stage == "retried":
        queue.run(queue.calls.retry_later("a", lease.fence, delay_ms=60_000, message="m"))
    if stage == "given back":
        queue.run(queue.calls.hand_over("a", lease.fence))
    return lease


# Which deadline applies


@pytest.mark.parametrize(
    "stage", ["held", "queued", "not before", "leased", "retried", "given back"]
)
def test_the_deadline_applies_in_every_state(queue, stage):
    lease = bring_to(queue, stage)
    queue.pass_deadline()
    assert queue.tick(reap=False).expired == 1  # grace is about workers, not about deadlines
    assert ended_with(queue, TOTAL)
    if stage == "leased":
        assert queue.append(lease, 2, i=0) == LOST
    assert queue.tick().expired == 0


@pytest.mark.parametrize("stage", ["held", "queued", "not before"])
def test_the_queue_deadline_applies_until_the_first_lease(queue, stage):
    bring_to(queue, stage, queue_deadline_ms=5_000)
    queue.pass_deadline("queue_deadline")
    assert queue.tick().expired == 1
    assert ended_with(queue, QUEUE)


@pytest.mark.parametrize("stage", ["leased", "retried", "given back"])
def test_after_the_first_lease_the_queue_deadline_is_over(queue, stage):
    bring_to(queue, stage, queue_deadline_ms=5_000)
    queue.pass_deadline("queue_deadline")
    assert queue.tick().expired == 0
    # Maintenance looks at the next one from now on.
    assert queue.client.zscore(queue.keys.deadlines, "a") == queue.record().deadline_ms
    queue.pass_deadline()
    assert queue.tick().expired == 1
    assert ended_with(queue, TOTAL)


@pytest.mark.parametrize(
    "stage", ["held", "queued", "not before", "leased", "retried", "given back"]
)
def test_the_first_token_deadline_applies_in_every_state_without_a_token(queue, stage):
    lease = bring_to(queue, stage, first_token_deadline_ms=5_000)
    if stage == "leased":
        assert queue.append(lease, 1, ev="start", i=0) == STORED  # no token
    queue.pass_deadline("first_token_deadline")
    assert queue.tick().expired == 1
    assert ended_with(queue, FIRST_TOKEN)


@pytest.mark.parametrize("stage", ["leased", "retried", "given back", "leased again"])
def test_after_the_first_token_its_deadline_is_over(queue, stage):
    """The token counts, whichever attempt made it."""
    lease = queue.leased(first_token_deadline_ms=5_000)
    queue.append(lease, 1, ev="start", i=0)
    queue.append(lease, 2, i=0, k=[7])
    if stage == "retried":
        queue.run(queue.calls.retry_later("a", lease.fence, delay_ms=60_000, message="m"))
    elif stage != "leased":
        queue.run(queue.calls.hand_over("a", lease.fence))
    for _ in range(2 if stage == "leased again" else 0):
        (lease,) = queue.lease()
        queue.run(queue.calls.hand_over("a", lease.fence))
    queue.pass_deadline("first_token_deadline")
    assert queue.tick().expired == 0
    assert queue.client.zscore(queue.keys.deadlines, "a") == queue.record().deadline_ms


def test_of_several_that_passed_the_earliest_is_named(queue):
    queue.enqueue("a", queue_deadline_ms=5_000, first_token_deadline_ms=6_000)
    for name in ("deadline", "first_token_deadline", "queue_deadline"):
        queue.pass_deadline(name)
        queue.await_next_ms()
    queue.tick()
    assert ended_with(queue, TOTAL)


def test_maintenance_looks_at_the_nearest(queue):
    queue.enqueue("a", queue_deadline_ms=3_000, first_token_deadline_ms=2_000)
    record = queue.record()
    assert queue.client.zscore(queue.keys.deadlines, "a") == record.first_token_deadline_ms
    assert record.first_token_deadline_ms == record.created_ms + 2_000
    assert record.queue_deadline_ms == record.created_ms + 3_000
    queue.enqueue("b")
    assert queue.record("b").queue_deadline_ms is None
    assert queue.record("b").first_token_deadline_ms is None


# At the lease


@pytest.mark.parametrize(
    ("name", "message"),
    [("deadline", TOTAL), ("queue_deadline", QUEUE), ("first_token_deadline", FIRST_TOKEN)],
)
def test_a_lease_checks_every_deadline(queue, name, message):
    options = {} if name == "deadline" else {f"{name}_ms": 5_000}
    queue.enqueue("a", **options)
    queue.pass_deadline(name)
    (reply,) = queue.run(queue.calls.lease("w", queue.read()))
    assert reply.code == "EXPIRED"
    assert ended_with(queue, message)


def test_a_deadline_that_is_due_this_very_millisecond_has_passed(queue):
    queue.enqueue("a", queue_deadline_ms=0)
    (reply,) = queue.run(queue.calls.lease("w", queue.read()))
    assert reply.code == "EXPIRED"
    queue.enqueue("b", queue_deadline_ms=0)
    assert queue.tick().expired == 1


def test_a_second_lease_asks_for_the_deadline_that_is_left(queue):
    """The queue deadline passed while the request was back in the queue: it had been taken once."""
    lease = queue.leased(queue_deadline_ms=5_000, deadline_ms=60_000)
    queue.run(queue.calls.hand_over("a", lease.fence))
    queue.pass_deadline("queue_deadline")
    (again,) = queue.lease()
    assert (again.attempt, again.remaining_ms > 50_000) == (2, True)


def test_a_held_request_that_expired_is_passed_over(queue):
    for name in ("x", "y", "a", "z"):
        queue.enqueue(name)
    queue.pass_deadline("deadline", "a")
    queue.tick()
    queue.lease(count=1)
    assert (queue.record("a").state, queue.record("z").state) == ("expired", "queued")


# Delays


def test_a_delayed_request_waits_and_its_deadlines_count_from_then(queue):
    reply = queue.enqueue("a", delay_ms=60_000, deadline_ms=5_000, queue_deadline_ms=2_000)
    assert (reply.status, reply.state) == ("OK", "delayed")
    record, start_ms = queue.record(), reply.created_ms + 60_000
    assert (record.state, record.not_before_ms, record.attempts) == ("delayed", start_ms, 0)
    assert (record.deadline_ms, record.queue_deadline_ms) == (start_ms + 5_000, start_ms + 2_000)
    assert queue.client.zscore(queue.keys.delayed, "a") == start_ms
    assert queue.client.zscore(queue.keys.deadlines, "a") == start_ms + 2_000
    lifetime_ms = 65_000 + POLICY.retention_ms
    assert lifetime_ms - 10_000 < queue.client.pttl(queue.keys.record("a")) <= lifetime_ms
    assert queue.tick().promoted == 0
    assert queue.read() == []


def test_when_due_it_enters_its_class_behind_what_was_there(queue):
    queue.enqueue("a", delay_ms=60_000, priority_class="2")
    queue.enqueue("b", priority_class="2")
    queue.client.zadd(queue.keys.delayed, {"a": 1})
    assert queue.tick().promoted == 1
    assert [(e.ready_class, e.request_id) for e in queue.read()] == [("2", "b"), ("2", "a")]


def test_when_due_it_waits_for_its_tenants_window(queue):
    queue.enqueue("a", tenant="t", delay_ms=60_000)
    for name in ("x", "y"):
        queue.enqueue(name, tenant="t")
    queue.client.zadd(queue.keys.delayed, {"a": 1})
    assert queue.tick().promoted == 1
    assert queue.record().state == "held"
    queue.lease(count=1)
    assert queue.record().state == "queued"


def test_it_waits_for_nobody_but_counts_against_its_tenants_share(queue):
    for i in range(4):
        assert queue.enqueue(f"t{i}", tenant="t", delay_ms=60_000).status == "OK"
    assert queue.enqueue("t4", tenant="t").status == "TENANT_FULL"
    queue.run(queue.calls.cancel("t0"))
    assert queue.enqueue("t4", tenant="t").state == "queued"  # the window is free


def test_a_delayed_request_is_cancelled_at_once(queue):
    queue.enqueue("a", delay_ms=60_000)
    assert queue.run(queue.calls.cancel("a")).cancelled
    assert queue.client.zcard(queue.keys.delayed) == 0
    queue.client.zadd(queue.keys.delayed, {"a": 1})  # even if it were left there
    assert queue.tick().promoted == 0
    assert queue.record().state == "cancelled"


def test_waiting_time_counts_from_when_it_might_be_served(queue):
    queue.enqueue("a", delay_ms=1)
    queue.client.hset(queue.keys.record("a"), "created", queue.now_ms() - 60_000)
    queue.client.zadd(queue.keys.delayed, {"a": 1})
    queue.tick()
    (lease,) = queue.lease()
    assert lease.waited_ms < 30_000


def test_the_same_delayed_request_again_is_known(queue):
    first = queue.enqueue("a", delay_ms=60_000)
    again = queue.enqueue("a", delay_ms=90_000)
    assert (again.status, again.state, again.created_ms) == ("DUP", "delayed", first.created_ms)
    assert queue.record().not_before_ms == first.created_ms + 60_000
