"""Every transition of a request, one at a time, over fakeredis and a real server."""

from __future__ import annotations

import dataclasses
import json

import pytest
from redis.exceptions import ResponseError

from support_queue import POLICY, Queue
from tokenmill.calls import AppendEvent, QueueCalls
from tokenmill.keys import GROUP
from tokenmill.protocol import Usage
from tokenmill.ready import acreate_groups, create_groups
from tokenmill.replies import LOST, STORED, STORED_BEFORE, ReadyEntry, events_if_behind
from tokenmill.scripts import SCRIPT_NAMES, arun, load_script


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


# enqueue


def test_enqueue_makes_a_record_with_a_lifetime(queue):
    before_ms = queue.now_ms()
    reply = queue.enqueue("a", tenant="t", priority_class="0", deadline_ms=5_000)
    assert (reply.status, reply.state) == ("OK", "queued")
    assert before_ms <= reply.created_ms <= queue.now_ms()
    record = queue.record()
    assert (record.state, record.tenant, record.priority_class) == ("queued", "t", "0")
    assert record.created_ms == reply.created_ms
    assert record.deadline_ms == reply.created_ms + 5_000
    assert (record.attempts, record.leased_ms, record.ended_ms) == (0, None, None)
    assert 0 < queue.client.pttl(queue.keys.record("a")) <= 5_000 + POLICY.retention_ms


def test_the_same_request_again_is_known_and_another_content_is_refused(queue):
    first = queue.enqueue("a")
    again = queue.enqueue("a", tenant="other")
    assert (again.status, again.created_ms, again.state) == ("DUP", first.created_ms, "queued")
    assert queue.enqueue("a", body="{ }").status == "CONFLICT"
    queue.run(queue.calls.cancel("a"))
    assert queue.enqueue("a").state == "cancelled"


def test_limits_of_the_queue_and_of_a_tenant(queue):
    statuses = [queue.enqueue(f"t{i}", tenant="t").status for i in range(5)]
    assert statuses == ["OK"] * 4 + ["TENANT_FULL"]
    assert [queue.enqueue(f"u{i}", tenant="u").status for i in range(3)] == ["OK", "OK", "FULL"]
    refused = queue.enqueue("v", tenant="v")
    assert (refused.status, refused.reason, refused.queued) == ("FULL", "queue", 6)
    assert queue.enqueue("t0", tenant="t").status == "DUP"  # full or not
    queue.run(queue.calls.cancel("t0"))
    assert queue.enqueue("v", tenant="v").status == "OK"


@pytest.mark.parametrize(("size", "status"), [(100, "OK"), (101, "TOO_LARGE")])
def test_the_body_limit_counts_bytes(queue, size, status):
    assert queue.enqueue("a", body="x" * (size - 2) + "é").status == status
    assert queue.client.exists(queue.keys.record("a")) == (status == "OK")


def test_the_memory_flag_closes_the_queue(queue):
    queue.client.set(queue.keys.memory_flag, "1")
    reply = queue.enqueue("a")
    assert (reply.status, reply.reason) == ("FULL", "memory")


def test_a_tenant_has_at_most_its_window_in_the_ready_stream(queue):
    assert [queue.enqueue(f"t{i}", tenant="t").state for i in range(3)] == [
        "queued", "queued", "held",
    ]  # fmt: skip
    assert queue.enqueue("u", tenant="u").state == "queued"
    # t2 was in the queue before u, but its tenant had its share.
    assert [lease.request_id for lease in queue.lease(count=1)] == ["t0"]
    assert [entry.request_id for entry in queue.read()] == ["t1", "u", "t2"]


def test_a_class_that_does_not_exist_is_refused(queue):
    with pytest.raises(ResponseError, match="class"):
        queue.enqueue("a", priority_class="r")


# admit


def plain(queue, request_id, body="{}", **fields):
    queue.client.xadd(queue.keys.ready("1"), {"id": request_id, "body": body, **fields})
    (entry,) = queue.read()
    return entry


def test_a_plain_xadd_becomes_a_request(queue):
    entry = plain(queue, "a", tenant="t")
    assert queue.run(queue.calls.admit(entry)) == "OK"
    assert queue.run(queue.calls.admit(entry)) == "OK"
    assert queue.record().tenant == "t"
    (reply,) = queue.run(queue.calls.lease("w", [entry]))
    assert (reply.code, reply.lease.body) == ("OK", "{}")


def test_a_plain_xadd_of_a_known_id_is_dropped(queue):
    queue.enqueue("a")
    queue.lease()
    assert queue.run(queue.calls.admit(plain(queue, "a"))) == "DUP"
    assert queue.run(queue.calls.admit(plain(queue, "a", body="[]"))) == "CONFLICT"
    assert queue.client.xlen(queue.keys.ready("1")) == 1  # the lease's


@pytest.mark.parametrize(
    ("status", "code", "body", "flag"),
    [("TOO_LARGE", "too_long", "x" * 101, False), ("FULL", "queue_full", "{}", True)],
)
def test_a_refused_plain_xadd_ends_with_an_event(queue, status, code, body, flag):
    if flag:
        queue.client.set(queue.keys.memory_flag, "1")
    assert queue.run(queue.calls.admit(plain(queue, "a", body=body))) == status
    assert queue.record().state == "failed"
    assert queue.record().code == queue.end().code == code
    assert queue.client.xlen(queue.keys.ready("1")) == 0


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 65, "a:b", "{}"])
def test_a_plain_xadd_with_a_bad_id_is_dropped(queue, request_id):
    assert queue.run(queue.calls.admit(plain(queue, request_id))) == "INVALID"
    assert queue.client.xlen(queue.keys.ready("1")) == 0


# lease


def test_a_lease_carries_what_a_worker_needs(queue):
    lease = queue.leased(body='{"prompt": "é"}', tenant="t", deadline_ms=9_000)
    assert (lease.request_id, lease.ready_class, lease.attempt) == ("a", "1", 1)
    assert (lease.body, lease.tenant, lease.fingerprint) == ('{"prompt": "é"}', "t", "m1")
    assert (lease.num_events, lease.strikes) == (0, 0)
    assert 0 < lease.remaining_ms <= 9_000
    assert lease.waited_ms >= 0
    record = queue.record()
    assert (record.state, record.worker, record.attempts) == ("leased", "w", 1)
    assert record.leased_ms >= record.created_ms
    assert lease.fence == f"1.{record.created_ms}"
    assert queue.client.hgetall(queue.keys.owners) == {"a": lease.fence}


def test_a_lease_whose_reply_was_lost_is_given_again_to_its_holder_only(queue):
    lease = queue.leased()
    entry = ReadyEntry(lease.ready_class, lease.entry_id, "a")
    (again,) = queue.run(queue.calls.lease("w", [entry]))
    assert (again.code, again.lease) == (
        "OK",
        dataclasses.replace(
            lease, remaining_ms=again.lease.remaining_ms, waited_ms=again.lease.waited_ms
        ),
    )
    (other,) = queue.run(queue.calls.lease("v", [entry]))
    assert (other.code, other.lease) == ("BUSY", None)


def test_replies_to_a_lease_stand_in_the_order_of_the_entries(queue):
    queue.enqueue("a")
    queue.enqueue("b")
    queue.client.xadd(queue.keys.ready("1"), {"id": "never enqueued"})
    entries = queue.read()
    queue.run(queue.calls.cancel("a"))
    replies = queue.run(queue.calls.lease("w", entries))
    assert [(r.entry.request_id, str(r.code)) for r in replies] == [
        ("a", "GONE"), ("b", "OK"), ("never enqueued", "GONE"),
    ]  # fmt: skip


def test_a_deadline_that_passed_in_the_queue_ends_the_request_at_lease(queue):
    queue.enqueue("a", deadline_ms=0)
    (reply,) = queue.run(queue.calls.lease("w", queue.read()))
    assert reply.code == "EXPIRED"
    assert (queue.record().state, queue.end().code) == ("expired", "deadline_exceeded")


def test_the_next_holder_learns_what_is_in_the_log_and_who_began(queue):
    lease = queue.leased()
    assert queue.append(lease, 1, ev="start", i=0) == STORED
    queue.run(queue.calls.hand_over("a", lease.fence))
    replies = queue.run(queue.calls.lease("v", queue.read("v"), fingerprint="m2"))
    (second,) = [reply.lease for reply in replies]
    assert (second.attempt, second.num_events) == (2, 1)
    assert (second.ready_class, second.fingerprint) == ("r", "m1")


# append and heartbeat


def test_append_stores_and_publishes_each_event_once(queue):
    lease = queue.leased()
    with queue.client.pubsub() as subscriber:
        subscriber.subscribe(queue.keys.channel("a"))
        subscriber.get_message(timeout=5)
        assert queue.append(lease, 1, i=0) == STORED
        assert queue.append(lease, 1, i=0) == STORED_BEFORE
        assert queue.append(lease, 2, i=1) == STORED
        published = [subscriber.get_message(timeout=5)["data"] for _ in range(2)]
        assert subscriber.get_message(timeout=0.01) is None
    log = queue.client.xrange(queue.keys.log("a"))
    assert log == [("1-0", {"d": published[0]}), ("2-0", {"d": published[1]})]
    ttl_ms = queue.client.pttl(queue.keys.log("a"))
    assert 0 < ttl_ms <= queue.client.pttl(queue.keys.record("a")) + 1000


def test_append_answers_each_request_by_itself(queue):
    a, b = queue.leased("a"), queue.leased("b")
    events = [
        AppendEvent("a", a.fence, 1, "{}"),
        AppendEvent("b", "2" + b.fence[1:], 1, "{}"),
        AppendEvent("c", a.fence, 1, "{}"),
        AppendEvent("b", b.fence, 4, "{}"),
    ]
    codes = queue.run(queue.calls.append(events))
    assert codes[:3] == [STORED, LOST, LOST]
    assert events_if_behind(codes[3]) == 0
    assert [events_if_behind(code) for code in codes[:3]] == [None, None, None]
    assert queue.run(queue.calls.append([])) == []


def test_a_batch_over_the_limit_is_not_sent(queue):
    with pytest.raises(ValueError, match="128"):
        queue.calls.append([AppendEvent("a", "1.1", 1, "{}")] * 129)
    lease = queue.leased()
    with pytest.raises(ValueError, match="512"):
        queue.calls.heartbeat("w", [lease] * 513)


def test_a_heartbeat_renews_only_a_lease_that_is_held(queue):
    lease = queue.leased()
    queue.append(lease, 1, i=0)
    queue.lose_worker()
    assert queue.run(queue.calls.heartbeat("w", [lease])) == [1]
    assert queue.tick().requeued == 0
    queue.lose_worker()
    assert queue.tick().requeued == 1
    assert queue.run(queue.calls.heartbeat("w", [lease])) == [LOST]


def test_a_late_heartbeat_does_not_steal_the_entry_from_the_next_holder(queue):
    first = queue.leased()
    queue.run(queue.calls.hand_over("a", first.fence))
    queue.run(queue.calls.lease("v", queue.read("v")))
    assert queue.run(queue.calls.heartbeat("w", [first])) == [LOST]
    (pending,) = queue.client.xpending_range(queue.keys.ready("r"), GROUP, "-", "+", 10)
    assert pending["consumer"] == "v"


# An id that is used again


def test_a_lease_of_a_lost_request_is_worth_nothing_for_the_next_one_of_its_id(queue):
    """Redis lost the record; the client enqueued again, and another worker took that."""
    old = queue.leased(body='{"v": 1}')
    queue.append(old, 1, ev="start", i=0)
    queue.client.delete(*queue.client.keys(f"{queue.keys.prefix}*"))
    create_groups(queue.client, queue.keys)
    queue.await_next_ms()
    new = queue.leased(body='{"v": 2}')
    assert new.attempt == old.attempt
    assert queue.append(old, 1, i=0) == LOST
    assert queue.run(queue.calls.heartbeat("w", [old])) == [LOST]
    assert queue.run(queue.calls.hand_over("a", old.fence)).status == "LOST"
    assert (queue.finish(old, 1).status, queue.finish(old, 1).state) == ("LOST", "leased")
    assert queue.append(new, 1, ev="start", i=0) == STORED
    assert queue.finish(new, 2).status == "OK"
    assert (queue.finish(old, 2).status, queue.finish(old, 2).state) == ("LOST", "done")


def test_nothing_of_a_vanished_request_touches_the_next_one_of_its_id(queue):
    """The record ran out of its lifetime and nobody ticked before the id was used again."""
    old = queue.leased(tenant="t")
    queue.append(old, 1, ev="start", i=0)
    queue.client.delete(queue.keys.record("a"))
    queue.client.zadd(queue.keys.delayed, {"a": 1})
    queue.await_next_ms()
    queue.enqueue("a", tenant="u")
    assert queue.append(old, 2, i=0) == LOST
    assert queue.client.exists(queue.keys.log("a"), queue.keys.owners, queue.keys.delayed) == 0
    queue.tick()
    counters = queue.client.hgetall(queue.keys.counters)
    tokens = {"queued_tokens": "256", "leased_tokens": "0"}  # of a body that asks for nothing
    assert counters == {"queued": "1", "leased": "0", "t:u": "1"} | tokens
    assert [lease.num_events for lease in queue.lease()] == [0]


# finish, release, cancel


def test_finish_ends_the_request_and_keeps_what_result_needs(queue):
    lease = queue.leased()
    queue.append(lease, 1, i=0)
    usage = Usage(prompt_tokens=3, completion_tokens=4, total_tokens=7)
    reply = queue.finish(lease, 2, usage=usage.model_dump_json())
    assert (reply.status, reply.state) == ("OK", "done")
    record = queue.record()
    assert (record.state, record.usage, record.end_seq) == ("done", usage, 2)
    assert record.ended_ms >= record.leased_ms
    assert queue.end().seq == 2
    assert queue.client.hexists(queue.keys.record("a"), "body") is False
    assert queue.client.xlen(queue.keys.ready("1")) == 0
    for key in (queue.keys.record("a"), queue.keys.log("a")):
        assert 0 < queue.client.pttl(key) <= POLICY.retention_ms


def test_finish_again_is_known_and_a_stranger_is_refused(queue):
    lease = queue.leased()
    assert queue.finish(lease, 1).status == "OK"
    assert queue.finish(lease, 1).status == "DUP"
    stranger = dataclasses.replace(lease, fence="2" + lease.fence[1:])
    assert (queue.finish(stranger, 1).status, queue.finish(stranger, 1).state) == ("LOST", "done")
    nobody = dataclasses.replace(lease, request_id="b")
    assert (queue.finish(nobody, 1).status, queue.finish(nobody, 1).state) == ("LOST", "")


def test_finish_waits_for_events_that_are_missing(queue):
    lease = queue.leased()
    queue.append(lease, 1, i=0)
    reply = queue.finish(lease, 3)
    assert (reply.status, reply.num_events) == ("BEHIND", 1)
    assert queue.record().state == "leased"


def test_a_failure_is_kept_with_its_code(queue):
    lease = queue.leased()
    queue.finish(lease, 1, state="failed", code="too_long", message="the prompt is too long")
    record = queue.record()
    assert (record.state, record.code) == ("failed", "too_long")
    assert record.message == "the prompt is too long"


def test_a_hand_over_goes_before_all_new_work(queue):
    lease = queue.leased("a")
    queue.enqueue("b", priority_class="0")
    reply = queue.run(queue.calls.hand_over("a", lease.fence))
    assert (reply.status, reply.state) == ("OK", "queued")
    assert [entry.request_id for entry in queue.read()] == ["a", "b"]
    assert queue.run(queue.calls.hand_over("a", lease.fence)).status == "LOST"


def test_errors_are_retried_after_a_pause_and_then_given_up(queue):
    queue.enqueue("a")
    for _ in range(2):
        (lease,) = queue.lease()
        call = queue.calls.retry_later("a", lease.fence, delay_ms=60_000, message="out of memory")
        assert queue.run(call).state == "delayed"
        assert queue.tick().promoted == 0
        queue.client.zadd(queue.keys.delayed, {"a": 1})
        assert queue.tick().promoted == 1
    (lease,) = queue.lease()
    reply = queue.run(
        queue.calls.retry_later("a", lease.fence, delay_ms=1, message="out of memory")
    )
    assert (reply.status, reply.state) == ("FAILED", "failed")
    assert (queue.end().code, queue.end().message) == ("retries_exhausted", "out of memory")


@pytest.mark.parametrize("stage", ["held", "queued", "delayed", "leased"])
def test_cancel_ends_a_request_wherever_it_is(queue, stage):
    if stage == "held":
        for other in ("x", "y"):
            queue.enqueue(other)
    queue.enqueue("a")
    if stage in ("delayed", "leased"):
        (lease,) = queue.lease()
    if stage == "delayed":
        queue.run(queue.calls.retry_later("a", lease.fence, delay_ms=60_000, message="m"))
    assert queue.record().state == stage
    reply = queue.run(queue.calls.cancel("a", message="by the user"))
    assert (reply.cancelled, reply.state) == (True, "cancelled")
    end = queue.end()
    assert (end.status, end.code, end.message) == ("cancelled", "cancelled", "by the user")
    assert end.attempt == (1 if stage in ("delayed", "leased") else 0)
    again = queue.run(queue.calls.cancel("a"))
    assert (again.cancelled, again.state) == (False, "cancelled")
    unknown = queue.run(queue.calls.cancel("b"))
    assert (unknown.cancelled, unknown.state) == (False, None)


def test_a_cancelled_entry_that_nobody_has_read_stays_for_its_reader(queue):
    queue.enqueue("a")
    queue.run(queue.calls.cancel("a"))
    assert queue.client.xlen(queue.keys.ready("1")) == 1
    assert queue.lease() == []
    assert queue.client.xlen(queue.keys.ready("1")) == 0


# What every script has in common


def test_scripts_are_loaded_again_after_redis_forgot_them(queue):
    queue.enqueue("a")
    queue.client.script_flush()
    assert queue.enqueue("a").status == "DUP"


async def test_the_same_calls_run_on_asyncio(redis_backend, keyspace):
    calls = QueueCalls(keyspace)
    async with redis_backend.async_client() as client:
        await acreate_groups(client, keyspace)
        await acreate_groups(client, keyspace)
        await client.script_flush()
        assert (await arun(client, calls.enqueue("a", body="{}"))).status == "OK"
        assert (await arun(client, calls.enqueue("a", body="{}"))).status == "DUP"


def test_a_cluster_is_served_by_sharded_publication(redis_client, keyspace):
    try:
        redis_client.spublish(keyspace.channel("a"), "")
    except ResponseError:
        pytest.skip("before Redis 7 there is no SPUBLISH")
    queue = Queue(redis_client, keyspace, dataclasses.replace(POLICY, publish="SPUBLISH"))
    lease = queue.leased()
    with redis_client.pubsub() as subscriber:
        subscriber.ssubscribe(keyspace.channel("a"))
        subscriber.get_message(timeout=5)
        queue.append(lease, 1, i=0)
        queue.finish(lease, 2)
        numbers = [json.loads(subscriber.get_message(timeout=5)["data"])["e"] for _ in range(2)]
    assert numbers == [1, 2]


@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_scripts_say_what_they_take(name):
    source = load_script(name).source
    assert "ARGV" in source
    assert "-- Reply" in source


def test_the_scripts_use_the_keys_of_the_key_table(queue):
    queue.enqueue("a")
    queue.enqueue("b")
    queue.enqueue("c")
    lease = queue.lease(count=1)[0]
    queue.append(lease, 1, i=0)
    queue.run(queue.calls.retry_later("a", lease.fence, delay_ms=60_000, message="m"))
    queue.tick()
    keys, client = queue.keys, queue.client
    assert client.type(keys.deadlines) == client.type(keys.delayed) == "zset"
    assert client.type(keys.counters) == client.type(keys.windows) == "hash"
    assert client.type(keys.maintenance) == client.type(keys.record("a")) == "hash"
    assert client.type(keys.log("a")) == client.type(keys.ready("1")) == "stream"
