"""What a refusal says about when to try again: what waits, divided by what ends per second."""

from __future__ import annotations

import pytest

from support_queue import POLICY, Queue
from tokenmill import QueueFull
from tokenmill.replies import EnqueueReply, EnqueueStatus


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def measured(queue, seconds_ago, ends=None, rate=None):
    """Maintenance measured last so long ago; since then so many requests have ended."""
    mapping = {"rate_since": queue.now_ms() - round(seconds_ago * 1000)}
    mapping |= {} if ends is None else {"ends": ends}
    mapping |= {} if rate is None else {"rate": rate}
    queue.client.hset(queue.keys.maintenance, mapping=mapping)


def rate_of(queue):
    rate = queue.client.hget(queue.keys.maintenance, "rate")
    return None if rate is None else float(rate)


def refused(queue):
    for i in range(POLICY.max_queued):
        queue.enqueue(f"f{i}", tenant=f"u{i}")
    return queue.enqueue("over", tenant="over")


@pytest.mark.parametrize(
    ("queued", "rate", "seconds"),
    [(0, 5.0, 1.0), (20, 4.0, 5.0), (3, 4.0, 1.0), (240, 4.0, 60.0), (999, 4.0, 60.0),
     (7, 0.0, 60.0), (7, None, 2.0)],
)  # fmt: skip
def test_the_hint_is_queue_over_rate_within_bounds(queued, rate, seconds):
    reply = EnqueueReply(EnqueueStatus.FULL, reason="queue", queued=queued, rate=rate)
    assert reply.retry_after_s == seconds


def test_every_end_counts_whatever_it_is(queue):
    lease = queue.leased("a")
    queue.finish(lease, 1)
    queue.enqueue("b")
    queue.run(queue.calls.cancel("b"))
    queue.enqueue("c")
    queue.pass_deadline(request_id="c")
    queue.tick(reap=False)  # measures for the first time: since when is not known
    assert rate_of(queue) is None
    for name in ("d", "e"):
        queue.enqueue(name)
        queue.run(queue.calls.cancel(name))
    measured(queue, 4)
    queue.tick(reap=False)
    assert rate_of(queue) == pytest.approx(0.5, rel=0.2)


def test_the_rate_is_an_average_that_forgets(queue):
    queue.enqueue("a")
    measured(queue, 30, ends=300, rate=2.0)
    queue.tick(reap=False)
    # After its time constant 1/e of the old value is left: 10 + (2 - 10) / e.
    assert rate_of(queue) == pytest.approx(7.06, rel=0.05)


def test_an_idle_queue_keeps_its_rate_and_a_stuck_one_does_not(queue):
    measured(queue, 60, ends=0, rate=3.0)
    queue.tick(reap=False)
    assert rate_of(queue) == 3.0
    queue.enqueue("a")
    measured(queue, 60, ends=0, rate=3.0)
    queue.tick(reap=False)
    assert rate_of(queue) == pytest.approx(0.41, rel=0.1)


def test_several_workers_tick_but_one_measures(queue):
    queue.enqueue("a")
    measured(queue, 0.5, ends=100, rate=3.0)
    queue.tick(reap=False)
    assert rate_of(queue) == 3.0


def test_refusals_carry_what_waits_and_the_rate(queue):
    reply = refused(queue)
    assert (reply.status, reply.queued, reply.rate) == ("FULL", 6, None)
    measured(queue, 0, rate=0.25)
    assert refused(queue).retry_after_s == 24.0
    queue.client.set(queue.keys.memory_flag, "1")
    reply = refused(queue)
    assert (reply.reason, reply.retry_after_s) == ("memory", 24.0)


def test_a_tenants_refusal_counts_its_own_requests(queue):
    for i in range(4):
        queue.enqueue(f"t{i}", tenant="t")
    measured(queue, 0, rate=0.5)
    reply = queue.enqueue("over", tenant="t")
    assert (reply.status, reply.queued, reply.retry_after_s) == ("TENANT_FULL", 4, 8.0)


def test_the_client_passes_the_hint_on(queue, make_client):
    client = make_client(policy=POLICY)
    measured(queue, 0, rate=0.25)
    refused(queue)
    with pytest.raises(QueueFull) as caught:
        client.submit("x")
    assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 24.0)
