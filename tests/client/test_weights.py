"""Tenants' weights: how large a tenant's window is, also when it changes while requests wait."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from support_queue import Queue
from tokenmill.replies import TenantShare


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def set_weight(queue, weight, tenant="t"):
    return queue.run(queue.calls.set_weight(tenant, weight))


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
    assert queue.run(queue.calls.tenants()) == []
    enqueue_four(queue)
    queue.enqueue("u", tenant="u")
    set_weight(queue, 7, "v")
    set_weight(queue, 5)
    queue.lease(count=1)
    assert queue.run(queue.calls.tenants()) == [
        TenantShare("t", 5, 3), TenantShare("u", 1, 1), TenantShare("v", 7, 0),
    ]  # fmt: skip
    set_weight(queue, 1, "v")
    assert queue.client.hgetall(queue.keys.weights) == {"t": "5"}


@pytest.mark.parametrize("weight", [0, 101])
def test_a_weight_outside_its_bounds_is_not_sent(queue, weight):
    with pytest.raises(ValueError, match="100"):
        queue.calls.set_weight("t", weight)


@pytest.mark.parametrize("weight", ["0", "101", "1.5", "x", "nan"])
def test_the_script_refuses_it_too(queue, weight):
    call = queue.calls.set_weight("t", 1)
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
