"""Tenants' weights and the cap on what runs: who may enter the ready streams, and when."""

from __future__ import annotations

import dataclasses

import pytest
from redis.exceptions import ResponseError

from support_queue import POLICY, Queue
from tokenmill.calls import QueueCalls
from tokenmill.replies import TenantShare


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def set_weight(queue, weight, tenant="t"):
    return queue.run(queue.operator.set_weight(tenant, weight))


def enqueue_four(queue, tenant="t"):
    return [queue.enqueue(f"{tenant}{i}", tenant=tenant).state for i in range(4)]


def states(queue):
    return [queue.record(f"t{i}").state for i in range(4)]


def test_a_weight_multiplies_the_window(queue):
    assert set_weight(queue, 2) == 1
    assert enqueue_four(queue) == ["queued"] * 4
    assert [queue.enqueue(f"u{i}", tenant="u").state for i in range(2)] == ["queued"] * 2


def test_a_raised_weight_lets_waiting_requests_in_at_once(queue):
    assert enqueue_four(queue) == ["queued", "queued", "held", "held"]
    set_weight(queue, 2)
    assert states(queue) == ["queued"] * 4
    assert [entry.request_id for entry in queue.read()] == ["t0", "t1", "t2", "t3"]


def test_a_lowered_weight_lets_nothing_in_until_the_window_has_emptied(queue):
    set_weight(queue, 2)
    enqueue_four(queue)
    assert set_weight(queue, 1) == 2
    queue.lease(count=1)
    # Three of four stand in a window of two now.
    assert queue.enqueue("t4", tenant="t").state == "held"
    queue.lease(count=1)
    assert queue.record("t4").state == "held"
    queue.lease(count=1)
    assert queue.record("t4").state == "queued"


def test_a_weight_counts_in_each_class_and_for_one_tenant_only(queue):
    for i in range(3):
        queue.enqueue(f"t{i}", tenant="t", priority_class="0")
        queue.enqueue(f"u{i}", tenant="u", priority_class="0")
    set_weight(queue, 3)
    assert (queue.record("t2").state, queue.record("u2").state) == ("queued", "held")


def test_tenants_are_listed_with_weight_and_waiting_requests(queue):
    assert queue.run(queue.operator.tenants()) == []
    enqueue_four(queue)
    queue.enqueue("u", tenant="u")
    set_weight(queue, 7, "v")
    set_weight(queue, 5)
    queue.lease(count=1)
    assert queue.run(queue.operator.tenants()) == [
        TenantShare("t", 5, 3), TenantShare("u", 1, 1), TenantShare("v", 7, 0),
    ]  # fmt: skip
    set_weight(queue, 1, "v")
    assert queue.client.hgetall(queue.keys.weights) == {"t": "5"}


@pytest.mark.parametrize("weight", [0, 101])
def test_a_weight_outside_its_bounds_is_not_sent(queue, weight):
    with pytest.raises(ValueError, match="100"):
        queue.operator.set_weight("t", weight)


@pytest.mark.parametrize("weight", ["0", "101", "1.5", "x", "nan"])
def test_the_script_refuses_it_too(queue, weight):
    call = queue.operator.set_weight("t", 1)
    with pytest.raises(ResponseError, match="weight"):
        queue.client.eval(call.script.source, 1, call.key, *call.args[:2], weight)
    assert queue.client.exists(queue.keys.weights) == 0


def test_counting_again_respects_the_weight(queue):
    """Records vanished; what waited behind them comes in, twice as much for a weight of two."""
    set_weight(queue, 2)
    enqueue_four(queue)
    queue.client.hset(queue.keys.weights, "t", 1)
    for request_id in ("t0", "t1", "t2"):
        queue.client.delete(queue.keys.record(request_id))
        queue.client.zadd(queue.keys.deadlines, {request_id: 1})
    queue.tick()
    assert queue.client.hgetall(queue.keys.windows) == {"1:t": "1"}


# The cap on running requests


@pytest.fixture
def capped(redis_client, keyspace):
    """At most three of a tenant run; the window alone would let four in."""
    policy = dataclasses.replace(
        POLICY, max_running_per_tenant=3, window=4, max_queued=20, max_queued_per_tenant=20
    )
    return Queue(redis_client, keyspace, policy)


def test_a_tenant_at_its_cap_has_nothing_in_the_ready_streams(capped):
    states = [capped.enqueue(f"t{i}", tenant="t").state for i in range(5)]
    assert states == ["queued"] * 3 + ["held"] * 2
    leases = capped.lease()
    assert [lease.request_id for lease in leases] == ["t0", "t1", "t2"]
    assert capped.read() == []
    assert capped.enqueue("t5", tenant="t").state == "held"
    assert capped.enqueue("u", tenant="u").state == "queued"
    capped.finish(leases[0], 1)
    assert [entry.request_id for entry in capped.read()] == ["u", "t3"]


@pytest.mark.parametrize("how", ["done", "cancelled", "expired", "dead"])
def test_each_way_to_end_frees_a_place(capped, how):
    for i in range(4):
        capped.enqueue(f"t{i}", tenant="t")
    lease = capped.lease()[0]
    if how == "done":
        capped.finish(lease, 1)
    elif how == "cancelled":
        capped.run(capped.calls.cancel("t0"))
    elif how == "expired":
        capped.pass_deadline(request_id="t0")
        capped.tick(reap=False)
    else:
        capped.lose_worker()
        capped.run(capped.calls.heartbeat("w", []))
        capped.tick(max_strikes=1)
    assert capped.record("t0").state == how
    assert capped.record("t3").state == "queued"


def test_a_free_place_goes_to_the_most_urgent_class(capped):
    for i in range(3):
        capped.enqueue(f"t{i}", tenant="t", priority_class="2")
    leases = capped.lease()
    capped.enqueue("low", tenant="t", priority_class="2")
    capped.enqueue("high", tenant="t", priority_class="0")
    assert (capped.record("low").state, capped.record("high").state) == ("held", "held")
    capped.finish(leases[0], 1)
    assert capped.record("high").state == "queued"


def test_resumed_work_is_exempt_and_counts_again(capped):
    for i in range(4):
        capped.enqueue(f"t{i}", tenant="t")
    lease = capped.lease()[0]
    capped.run(capped.calls.hand_over("t0", lease.fence))
    # Its place went to t3; it resumes all the same.
    assert [entry.request_id for entry in capped.read()] == ["t0", "t3"]


def test_the_cap_grows_with_the_weight(capped):
    for i in range(7):
        capped.enqueue(f"t{i}", tenant="t")
    capped.lease()
    set_weight(capped, 2)
    assert [entry.request_id for entry in capped.read()] == ["t3", "t4", "t5"]
    assert capped.record("t6").state == "held"


def test_a_cap_that_is_lifted_lets_waiting_requests_in(capped):
    """They need not wait until one of those that run has ended."""
    for i in range(5):
        capped.enqueue(f"t{i}", tenant="t")
    leases = capped.lease()
    capped.tick(max_running_per_tenant=0, reap=False)
    assert [entry.request_id for entry in capped.read()] == ["t3", "t4"]
    assert len(leases) == 3


def test_the_workers_cap_binds_clients_that_know_of_none(capped):
    client = QueueCalls(capped.keys, dataclasses.replace(capped.policy, max_running_per_tenant=0))
    states = [capped.run(client.enqueue(f"t{i}", body="{}", tenant="t")).state for i in range(4)]
    assert states == ["queued"] * 3 + ["held"]


def test_running_requests_of_a_tenant_are_counted_without_a_cap_too(queue):
    queue.enqueue("a", tenant="t")
    (lease,) = queue.lease()
    assert queue.client.hget(queue.keys.counters, "l:t") == "1"
    queue.finish(lease, 1)
    assert queue.client.hexists(queue.keys.counters, "l:t") is False
