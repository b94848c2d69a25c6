"""Dead letters: how long a body is kept, another life, and how they are forgotten."""

from __future__ import annotations

import pytest

from support_queue import POLICY, Queue
from tokenmill.dead_letters import DeadLetter

DAY_MS = 86_400_000


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def letters(queue):
    return DeadLetter.parse_all(queue.client.xrange(queue.keys.dead_letters))


def die(queue, request_id="a", policy=None, **options):
    """A request whose worker was lost once too often; its last lease."""
    lease = queue.leased(request_id, **options)
    queue.append(lease, 1, ev="start", i=0)
    queue.lose_worker()
    assert queue.tick(max_strikes=1, **(policy or {})).dead == 1
    return lease


def requeue(queue, request_id="a"):
    return queue.run(queue.operator.requeue_dead(request_id))


def test_the_body_stays_in_the_record_and_out_of_the_letter(queue):
    before_ms = queue.now_ms()
    die(queue, body='{"prompt": "x"}', tenant="t")
    (letter,) = letters(queue)
    assert (letter.request_id, letter.tenant, letter.why) == ("a", "t", "worker_crash")
    assert (letter.attempts, letter.worker) == (1, "w")
    assert before_ms <= letter.died_ms <= queue.now_ms()
    assert queue.client.hget(queue.keys.record("a"), "body") == '{"prompt": "x"}'
    for key in (queue.keys.record("a"), queue.keys.log("a"), queue.keys.history("a")):
        assert POLICY.retention_ms < queue.client.pttl(key) <= DAY_MS


@pytest.mark.parametrize("kept_ms", [0, 1])
def test_a_body_is_kept_only_if_asked_for(queue, kept_ms):
    die(queue, policy={"dead_letter_body_ms": kept_ms})
    assert queue.client.hexists(queue.keys.record("a"), "body") == bool(kept_ms)
    for key in (queue.keys.record("a"), queue.keys.log("a"), queue.keys.history("a")):
        assert 0 < queue.client.pttl(key) <= POLICY.retention_ms


def test_another_life_has_the_same_body_and_terms_and_a_log_of_its_own(queue):
    terms = {"tenant": "t", "priority_class": "2", "deadline_ms": 50_000}
    old = die(queue, body='{"v": 1}', first_token_deadline_ms=30_000, **terms)
    before = queue.record()
    reply = requeue(queue)
    assert (reply.status, reply.state) == ("OK", "queued")
    record = queue.record()
    assert record.created_ms == reply.created_ms > before.created_ms
    assert (record.state, record.tenant, record.priority_class) == ("queued", "t", "2")
    assert record.deadline_ms - record.created_ms == 50_000
    assert record.first_token_deadline_ms - record.created_ms == 30_000
    assert (record.attempts, record.strikes, record.worker) == (0, 0, None)
    assert (record.code, record.message, record.end_seq, record.ended_ms) == (None,) * 4
    assert (record.leased_ms, record.fingerprint) == (None, None)
    assert letters(queue) == []
    assert queue.client.exists(queue.keys.log("a")) == 0
    assert [line["ev"] for line in queue.history()] == ["enqueued", "queued"]
    (new,) = queue.lease()
    assert (new.attempt, new.num_events, new.body) == (1, 0, '{"v": 1}')
    assert queue.append(old, 2, i=0) == -1
    assert queue.finish(new, 1).status == "OK"


def test_another_life_waits_for_its_tenants_window(queue):
    die(queue, tenant="t")
    for request_id in ("x", "y"):
        queue.enqueue(request_id, tenant="t")
    assert requeue(queue).state == "held"
    queue.lease(count=1)
    assert queue.record().state == "queued"


def test_a_delay_is_not_served_twice(queue):
    queue.enqueue("a", delay_ms=60_000, deadline_ms=5_000)
    queue.client.zadd(queue.keys.delayed, {"a": 1})
    queue.tick()
    queue.lease()
    queue.lose_worker()
    queue.tick(max_strikes=1)
    assert requeue(queue).state == "queued"
    record = queue.record()
    assert record.not_before_ms is None
    assert record.deadline_ms - record.created_ms == 5_000


def test_what_cannot_be_queued_again_stays_as_it_is(queue):
    assert requeue(queue).status == "UNKNOWN"
    queue.enqueue("a")
    reply = requeue(queue)
    assert (reply.status, reply.state) == ("NOT_DEAD", "queued")
    queue.finish(queue.lease()[0], 1)
    die(queue, "b", policy={"dead_letter_body_ms": 0})
    reply = requeue(queue, "b")
    assert (reply.status, reply.state) == ("NO_BODY", "dead")
    assert "b" in [letter.request_id for letter in letters(queue)]


def test_a_repeated_call_makes_no_third_life(queue):
    die(queue)
    first = requeue(queue)
    again = requeue(queue)
    assert (again.status, again.created_ms, again.state) == ("NOT_DEAD", first.created_ms, "queued")


def test_a_plain_xadd_that_nobody_could_start_can_be_queued_again(queue):
    queue.client.xadd(queue.keys.ready("1"), {"id": "a", "body": '{"v": 2}', "tenant": "t"})
    for _ in range(POLICY.max_deliveries):
        queue.read()
        queue.lose_worker()
        queue.tick()
    assert queue.record().code == "undeliverable"
    assert requeue(queue).status == "OK"
    assert [lease.body for lease in queue.lease()] == ['{"v": 2}']


@pytest.mark.parametrize(("request_id", "size"), [("a b", 2), ("x" * 65, 2), ("a", 101)])
def test_a_plain_xadd_that_could_never_be_served_leaves_no_body(queue, request_id, size):
    queue.client.xadd(queue.keys.ready("1"), {"id": request_id, "body": "x" * size})
    for _ in range(POLICY.max_deliveries):
        queue.read()
        queue.lose_worker()
        queue.tick()
    assert queue.client.xlen(queue.keys.ready("1")) == 0
    assert not queue.client.hget(queue.keys.record(request_id), "body")
    assert len(letters(queue)) == (request_id == "a")


def test_purge_forgets_letters_and_their_requests(queue):
    die(queue, "a")
    die(queue, "b")
    requeue(queue, "b")
    stale = DeadLetter("1-1", "b", "", "", 1, "")
    assert queue.run(queue.operator.purge([*letters(queue), stale])) == 1
    assert letters(queue) == []
    assert queue.record("a") is None
    keys = queue.keys
    assert queue.client.exists(keys.log("a"), keys.history("a")) == 0
    assert queue.record("b").state == "queued"
    with pytest.raises(ValueError, match="512"):
        queue.operator.purge([stale] * 513)
