"""Maintenance: due times, deadlines, lost workers, and what happens when Redis is full."""

from __future__ import annotations

import dataclasses
import time

import pytest
from redis.exceptions import RedisError

from support_queue import POLICY, Queue
from support_redis import ServerBackend
from tokenmill._redis_errors import is_retryable
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import GROUP
from tokenmill.replies import STORED


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def letters(queue):
    return [fields for _, fields in queue.client.xrange(queue.keys.dead_letters)]


@pytest.mark.parametrize("stage", ["queued", "leased"])
def test_a_deadline_that_passed_ends_the_request(queue, stage):
    queue.enqueue("a")
    if stage == "leased":
        queue.lease()
    queue.pass_deadline()
    assert queue.tick(reap=False).expired == 1  # grace is about workers, not about deadlines
    assert (queue.record().state, queue.end().code) == ("expired", "deadline_exceeded")
    assert queue.tick().expired == 0


def test_a_lost_worker_that_made_progress_is_replaced_at_once(queue):
    lease = queue.leased()
    assert queue.append(lease, 1, ev="start", i=0) == STORED
    assert queue.append(lease, 2, i=0, k=[7]) == STORED
    queue.lose_worker()
    assert queue.tick().requeued == 1
    record = queue.record()
    assert (record.state, record.strikes) == ("queued", 0)
    assert [entry.ready_class for entry in queue.read()] == ["r"]
    assert queue.append(lease, 3, i=1, k=[8]) == -1


@pytest.mark.parametrize("strikes", [1, 2])
def test_each_worker_lost_without_a_token_doubles_the_pause(queue, strikes):
    queue.enqueue("a")
    for attempt in range(strikes):
        queue.client.zadd(queue.keys.delayed, {"a": 1}, xx=True)
        queue.tick()
        # A start event is no progress.
        assert queue.append(queue.lease()[0], attempt + 1, ev="start", i=0) == STORED
        queue.lose_worker()
        before_ms = queue.now_ms()
        assert queue.tick().requeued == 1
        after_ms = queue.now_ms()
    assert (queue.record().state, queue.record().strikes) == ("delayed", strikes)
    due_ms = queue.client.zscore(queue.keys.delayed, "a")
    pause_ms = POLICY.backoff_ms * 2 ** (strikes - 1)  # jitter 0.5: neither shorter nor longer
    assert before_ms + pause_ms <= due_ms <= after_ms + pause_ms


def test_a_suspect_that_was_held_back_is_not_blamed_again(queue):
    """A worker lets suspects begin one at a time; those that never did are innocent of its end."""
    queue.enqueue("a")
    strikes = []
    for has_begun in (False, False, True, False):
        queue.client.zadd(queue.keys.delayed, {"a": 1}, xx=True)
        queue.tick()
        (lease,) = queue.lease()
        if has_begun:
            assert queue.append(lease, lease.num_events + 1, ev="start", i=0) == STORED
        queue.lose_worker()
        assert queue.tick().requeued == 1
        strikes.append(queue.record().strikes)
    assert strikes == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("policy", "code"),
    [({"max_strikes": 1}, "worker_crash"), ({"max_attempts": 1}, "too_many_attempts")],
)
def test_a_request_is_given_up_and_buried(queue, policy, code):
    queue.leased(tenant="t")
    queue.lose_worker()
    assert queue.tick(**policy).dead == 1
    assert (queue.record().state, queue.end().code) == ("dead", code)
    (letter,) = letters(queue)
    assert letter == {"id": "a", "tenant": "t", "why": code, "attempts": "1", "worker": "w"}


def test_an_entry_that_was_read_but_never_leased_goes_to_another_reader(queue):
    queue.enqueue("a")
    for _ in range(POLICY.max_deliveries - 1):
        assert len(queue.read()) == 1
        queue.lose_worker()
        assert queue.tick().redelivered == 1
    queue.read()
    queue.lose_worker()
    assert queue.tick().dead == 1
    assert (queue.record().state, queue.end().code) == ("dead", "undeliverable")
    assert letters(queue)[0]["why"] == "undeliverable"


def test_a_plain_xadd_whose_readers_died_is_not_lost(queue):
    queue.client.xadd(queue.keys.ready("1"), {"id": "a", "body": "{}", "tenant": "t"})
    for _ in range(POLICY.max_deliveries - 1):
        queue.read()
        queue.lose_worker()
        assert queue.tick().redelivered == 1
    (entry,) = queue.read()
    assert (entry.request_id, entry.body, entry.tenant) == ("a", "{}", "t")
    queue.lose_worker()
    assert queue.tick().dead == 1
    assert [letter["why"] for letter in letters(queue)] == ["undeliverable"]
    assert (queue.record().state, queue.record().tenant) == ("dead", "t")
    assert queue.client.hget(queue.keys.record("a"), "body") == "{}"
    assert queue.client.xlen(queue.keys.ready("1")) == 0


@pytest.mark.parametrize("last_tick_ms_ago", [None, POLICY.lease_ms, -POLICY.lease_ms])
def test_after_an_outage_or_a_jump_of_the_clock_nobody_is_declared_lost(queue, last_tick_ms_ago):
    queue.leased()
    queue.lose_worker()
    if last_tick_ms_ago is not None:
        mapping = {"last": queue.now_ms() - last_tick_ms_ago, "reap_after": 0}
        queue.client.hset(queue.keys.maintenance, mapping=mapping)
    report = queue.tick(reap=False)
    assert (report.in_grace, report.requeued) == (True, 0)
    assert queue.tick(reap=False).in_grace  # for a whole lease, not for one tick
    reap_after_ms = int(queue.client.hget(queue.keys.maintenance, "reap_after"))
    assert reap_after_ms == pytest.approx(queue.now_ms() + POLICY.lease_ms, abs=5_000)
    assert queue.tick().requeued == 1


def test_counters_are_right_again_after_records_vanished(queue):
    """Nobody ticked until the records had outlived deadline and retention."""
    queue.leased("u", tenant="u")
    for i in range(4):
        queue.enqueue(f"t{i}", tenant="t")
    vanished = ["t0", "t1", "t3"]
    for request_id in (*vanished, "u"):
        queue.client.delete(queue.keys.record(request_id))
        queue.client.zadd(queue.keys.deadlines, {request_id: 1})
    report = queue.tick(tick_limit=3)
    assert report.vanished == 3
    assert queue.tick(tick_limit=3).vanished == 1
    counters = queue.client.hgetall(queue.keys.counters)
    tokens = {"queued_tokens": "256", "leased_tokens": "0"}  # of a body that asks for nothing
    assert counters == {"queued": "1", "leased": "0", "t:t": "1"} | tokens
    assert queue.client.hgetall(queue.keys.owners) == {}
    # t2 waited behind a window of vanished requests.
    assert [lease.request_id for lease in queue.lease()] == ["t2"]


def test_a_lease_without_a_pending_entry_is_found(queue):
    lease = queue.leased()
    queue.client.xack(queue.keys.ready("1"), GROUP, lease.entry_id)
    assert queue.tick().recovered == 1
    assert [found.request_id for found in queue.lease()] == ["a"]


def test_consumers_without_work_are_removed_and_others_are_kept(queue):
    queue.leased()
    queue.enqueue("b")
    reader = queue.read("gone")[0]
    queue.run(queue.calls.lease("gone", [reader]))
    queue.finish(dataclasses.replace(queue.leased("c"), request_id="b"), 1)
    give_up_at = time.monotonic() + 10
    while queue.tick(lease_ms=20, max_attempts=1000, max_strikes=1000).consumers == 0:
        assert time.monotonic() < give_up_at
    assert queue.client.xlen(queue.keys.ready("r")) + queue.client.zcard(queue.keys.delayed) > 0


def test_a_consumer_that_has_a_card_is_kept_however_idle(queue):
    for worker in ("waits", "gone"):
        queue.client.xgroup_createconsumer(queue.keys.ready("r"), GROUP, worker)
    queue.client.set(queue.keys.worker_card("waits"), "{}")
    give_up_at = time.monotonic() + 10
    while queue.tick(lease_ms=20, max_attempts=1000, max_strikes=1000).consumers == 0:
        assert time.monotonic() < give_up_at
    left = queue.client.xinfo_consumers(queue.keys.ready("r"), GROUP)
    assert [consumer["name"] for consumer in left] == ["waits"]


def test_old_dead_letters_go(queue):
    queue.leased()
    queue.lose_worker()
    queue.tick(max_strikes=1)
    assert len(letters(queue)) == 1
    queue.tick(dead_letter_ms=-1_000)
    assert letters(queue) == []


def lag(client, stream):
    (group,) = client.xinfo_groups(stream)
    return group["lag"]


def test_the_lag_stays_true_when_requests_end_in_any_order(server, keyspace):
    with ServerBackend(server).client() as client:
        queue = Queue(client, keyspace)
        stream = keyspace.ready("1")
        if "lag" not in client.xinfo_groups(stream)[0]:
            pytest.skip("this server reports no lag")
        for i in range(4):
            queue.enqueue(f"a{i}", tenant=f"t{i}")
            queue.await_next_ms()  # ids made in one millisecond are neighbours
        _, last = queue.lease(count=2)
        queue.finish(last, 1)  # the entry that was delivered last is deleted
        queue.run(queue.calls.cancel("a2"))  # nobody has read it
        queue.lease(count=1)
        queue.enqueue("a4")
        queue.tick()
        assert lag(client, stream) == len(queue.read()) == 2
        assert lag(client, stream) == 0


def test_a_full_redis_refuses_growth_and_lets_requests_end(keyspace):
    with EmbeddedServer() as server, ServerBackend(server).client() as client:
        queue = Queue(client, keyspace)
        a, b = queue.leased("a"), queue.leased("b")
        queue.enqueue("c")
        client.config_set("maxmemory", 1)
        for growing in (
            lambda: queue.enqueue("d"),
            lambda: queue.append(a, 1, i=0),
            lambda: queue.lease(),
            lambda: queue.tick(reap=False),
        ):
            with pytest.raises(RedisError) as refused:
                growing()
            assert is_retryable(refused.value)
        assert queue.run(queue.calls.heartbeat("w", [a, b])) == [0, 0]
        assert queue.finish(a, 1).status == "OK"
        assert queue.run(queue.calls.cancel("b")).cancelled
        assert queue.run(queue.calls.cancel("c")).cancelled
        client.config_set("maxmemory", 0)
        assert [queue.record(i).state for i in "abc"] == ["done", "cancelled", "cancelled"]
