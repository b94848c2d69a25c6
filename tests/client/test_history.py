"""The history of a request: what happened to it, in the words of `explain`."""

from __future__ import annotations

import json

import pytest
from redis.exceptions import ResponseError

from support_queue import POLICY, Queue


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def story(queue, request_id="a"):
    """Without times."""
    return [{k: v for k, v in line.items() if k != "t"} for line in queue.history(request_id)]


def hand_over(queue, lease, **options):
    return queue.run(queue.calls.hand_over(lease.request_id, lease.fence, **options))


def test_a_request_that_is_served_at_once(queue):
    before_ms = queue.now_ms()
    lease = queue.leased()
    queue.append(lease, 1, ev="start", i=0)
    queue.finish(lease, 2, facts='{"tokens": 3, "cached_tokens": 32}')
    assert story(queue) == [
        {"ev": "enqueued", "class": "1"},
        {"ev": "queued", "q": "1"},
        {"ev": "leased", "a": 1, "w": "w", "e": 0},
        {"ev": "ended", "st": "done", "facts": {"tokens": 3, "cached_tokens": 32}},
    ]
    times = [line["t"] for line in queue.history()]
    assert times == sorted(times)
    assert before_ms <= times[0] <= times[-1] <= queue.now_ms()
    assert 0 < queue.client.pttl(queue.keys.history("a")) <= POLICY.retention_ms


def test_a_request_that_waits_for_its_tenants_window(queue):
    for request_id in ("x", "y", "a"):
        queue.enqueue(request_id)
    assert [line["ev"] for line in story(queue)] == ["enqueued", "held"]
    queue.lease(count=1)
    assert [line["ev"] for line in story(queue)] == ["enqueued", "held", "queued"]


def test_hand_overs_errors_and_losses_tell_why(queue):
    lease = queue.leased()
    hand_over(queue, lease, reason="no_room", facts='{"tokens": 0}')
    (lease,) = queue.lease()
    call = queue.calls.retry_later("a", lease.fence, delay_ms=60_000, message="secret")
    queue.run(call)
    due_ms = int(queue.client.zscore(queue.keys.delayed, "a"))
    queue.client.zadd(queue.keys.delayed, {"a": 1})
    queue.tick()
    queue.lease()
    queue.lose_worker()
    queue.tick()
    lost_due_ms = int(queue.client.zscore(queue.keys.delayed, "a"))
    queue.run(queue.calls.cancel("a"))
    assert story(queue)[3:] == [
        {"ev": "handed_over", "why": "no_room", "facts": {"tokens": 0}},
        {"ev": "queued", "q": "r"},
        {"ev": "leased", "a": 2, "w": "w", "e": 0},
        {"ev": "retried", "retries": 1, "due": due_ms},
        {"ev": "queued", "q": "r"},
        {"ev": "leased", "a": 3, "w": "w", "e": 0},
        {"ev": "requeued", "why": "worker_lost", "strikes": 1, "due": lost_due_ms},
        {"ev": "ended", "st": "cancelled", "code": "cancelled"},
    ]
    assert "secret" not in json.dumps(queue.history())


def test_an_entry_that_its_reader_never_took(queue):
    queue.enqueue("a")
    queue.read()
    queue.lose_worker()
    queue.tick()
    assert story(queue)[2:] == [
        {"ev": "requeued", "why": "never_leased"},
        {"ev": "queued", "q": "1"},
    ]


def test_a_plain_xadd_was_admitted(queue):
    queue.client.xadd(queue.keys.ready("1"), {"id": "a", "body": "{}"})
    (entry,) = queue.read()
    queue.run(queue.calls.admit(entry))
    assert story(queue) == [{"ev": "admitted", "class": "1"}]


def test_the_last_error_ends_with_its_facts(queue):
    queue.enqueue("a")
    for _ in range(POLICY.max_retries + 1):
        (lease,) = queue.lease()
        call = queue.calls.retry_later("a", lease.fence, delay_ms=0, message="m", facts='{"n": 1}')
        queue.run(call)
    assert story(queue)[-1] == {
        "ev": "ended", "st": "failed", "code": "retries_exhausted", "facts": {"n": 1},
    }  # fmt: skip


def test_a_long_history_keeps_its_first_line_and_the_latest(queue):
    queue.enqueue("a")
    for _ in range(40):
        hand_over(queue, queue.lease()[0])
    lines = story(queue)
    assert len(lines) == 100
    assert lines[0]["ev"] == "enqueued"
    assert lines[-3:] == [
        {"ev": "leased", "a": 40, "w": "w", "e": 0},
        {"ev": "handed_over", "why": "drain"},
        {"ev": "queued", "q": "r"},
    ]
    assert (queue.record().attempts, queue.record().handovers) == (40, 40)


@pytest.mark.parametrize("facts", ["{", "7", "null"])
def test_facts_that_are_no_object_change_nothing(queue, facts):
    lease = queue.leased()
    with pytest.raises(ResponseError):
        queue.finish(lease, 1, facts=facts)
    with pytest.raises(ResponseError):
        hand_over(queue, lease, facts=facts)
    assert queue.record().state == "leased"


def test_an_unknown_reason_is_refused(queue):
    lease = queue.leased()
    with pytest.raises(ResponseError, match="drain"):
        hand_over(queue, lease, reason="tired")


def test_hand_overs_are_no_attempts(queue):
    """A worker with little room, or a rolling restart, must not use a request up."""
    lease = queue.leased()
    for _ in range(3):
        hand_over(queue, lease)
        (lease,) = queue.lease()
    queue.append(lease, 1, ev="start", i=0)
    queue.append(lease, 2, i=0, k=[7])  # progress: no strike
    queue.lose_worker()
    assert queue.tick(max_attempts=2).requeued == 1
    (lease,) = queue.lease()
    queue.append(lease, 3, ev="start", i=1)
    queue.append(lease, 4, i=1, k=[8])
    queue.lose_worker()
    assert queue.tick(max_attempts=2).dead == 1
    assert queue.end().code == "too_many_attempts"
    assert (queue.record().attempts, queue.record().handovers) == (5, 3)
