"""What the exporter counts: work in tokens, from Redis alone."""

from __future__ import annotations

import dataclasses
import json

import pytest
import redis

from support_queue import POLICY, Queue
from tokenmill._backlog import MemoryReading, PoolReading
from tokenmill._backlog_reader import PLAIN_LOOK, read_pool
from tokenmill._work import estimate_tokens
from tokenmill.keys import Keyspace
from tokenmill.scripts import run

#: 3 tokens of prompt, 20 of answer.
BODY = json.dumps({"prompt_token_ids": [1, 2, 3], "max_tokens": 20})
WORK = 23
LARGE_BODY = json.dumps({"prompt_token_ids": [1, 2, 3], "max_tokens": 2000})
LARGE_WORK = 2003
ROOMY = dataclasses.replace(POLICY, max_queued=1000, max_queued_per_tenant=1000)


@pytest.fixture
def queue(redis_client: redis.Redis, keyspace: Keyspace) -> Queue:
    return Queue(redis_client, keyspace, ROOMY)


def read(*queues: Queue) -> PoolReading:
    return read_pool([(queue.client, queue.keys) for queue in queues])


def card(queue: Queue, worker: str, **facts: object) -> None:
    queue.client.set(queue.keys.worker_card(worker), json.dumps(facts))


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ('{"prompt":"12345678","max_tokens":10}', 12),
        ('{"prompt":"123456789"}', 3 + 256),
        ('{"prompt_token_ids":[1,2,3],"max_tokens":1}', 4),
        ('{"messages":[{"role":"user","content":"1234"}],"max_tokens":1}', 8),
        (
            '{"messages":[{"role":"user","content":[{"type":"text","text":"12345678"}]}],'
            '"max_tokens":1}',
            9,
        ),
        ('{"prompt":"\\"max_tokens\\":9999","max_tokens":1}', 6),
        ("{}", 256),
        ("", 0),
        ("[1]", 0),
        ("nonsense", 0),
        ('{"max_tokens":true,"prompt":7,"messages":7}', 256),
        ('{"max_tokens":1e99}', 256),
        ('{"max_tokens":-5,"prompt":"1"}', 1),
    ],
)
def test_the_work_of_a_body(body: str, tokens: int) -> None:
    assert estimate_tokens(body) == tokens


def test_a_pool_that_never_was_is_empty(redis_client: redis.Redis, keyspace: Keyspace) -> None:
    reading = read_pool([(redis_client, keyspace)])

    assert (reading.waiting, reading.leased, reading.waiting_tokens) == (0, 0, 0)
    assert (reading.running_tokens, reading.oldest_s, reading.tokens_per_s) == (0, 0.0, None)


def test_work_moves_from_waiting_to_running_and_goes(queue: Queue) -> None:
    for number in range(3):
        queue.enqueue(f"r{number}", body=BODY)
    assert read(queue).waiting_tokens == 3 * WORK

    leases = queue.lease(count=2)
    reading = read(queue)
    assert (reading.queued, reading.leased) == (1, 2)
    assert (reading.waiting_tokens, reading.running_tokens) == (WORK, 2 * WORK)

    queue.append(leases[0], 1, ev="start", i=0)
    queue.finish(leases[0], 2)
    queue.run(queue.calls.cancel(leases[1].request_id))
    queue.run(queue.calls.cancel("r2"))
    reading = read(queue)
    assert (reading.waiting_tokens, reading.running_tokens) == (0, 0)


def test_held_requests_are_work_too(queue: Queue) -> None:
    for number in range(5):  # the window has room for 2
        queue.enqueue(f"r{number}", body=BODY, tenant="a")
    reading = read(queue)

    assert reading.backlog_tokens == 5 * WORK
    assert (reading.classes["1"].ready, reading.classes["1"].held) == (2, 3)


def test_a_request_for_later_is_no_work_until_it_is_due(queue: Queue) -> None:
    queue.enqueue("now", body=BODY)
    queue.enqueue("tomorrow", body=LARGE_BODY, delay_ms=86_400_000)
    reading = read(queue)
    assert (reading.waiting, reading.delayed) == (2, 1)
    assert (reading.waiting_tokens, reading.deferred_tokens) == (WORK + LARGE_WORK, LARGE_WORK)
    assert reading.backlog_tokens == WORK
    assert reading.oldest_s < 5

    queue.client.zadd(queue.keys.delayed, {"tomorrow": queue.now_ms() - 1})
    reading = read(queue)  # no worker is there to put it into its line, and one must be woken
    assert (reading.delayed, reading.deferred_tokens) == (0, 0)
    assert reading.backlog_tokens == WORK + LARGE_WORK

    queue.tick()
    reading = read(queue)
    assert (reading.delayed, reading.deferred_tokens) == (0, 0)
    assert reading.backlog_tokens == WORK + LARGE_WORK
    assert reading.oldest_s < 5  # it waits since it is due, not since it was sent


def test_of_delayed_requests_those_that_are_due_count_with_the_mean(queue: Queue) -> None:
    queue.enqueue("small", body=BODY, delay_ms=60_000)
    queue.enqueue("large", body=LARGE_BODY, delay_ms=60_000)
    queue.client.zadd(queue.keys.delayed, {"small": queue.now_ms() - 1})
    reading = read(queue)

    assert reading.delayed == 1
    assert reading.backlog_tokens == (WORK + LARGE_WORK) // 2


@pytest.mark.parametrize("way", ["cancelled", "expired", "retried", "taken"])
def test_delayed_tokens_go_whatever_becomes_of_the_request(queue: Queue, way: str) -> None:
    if way == "retried":
        lease = queue.leased("later", body=BODY)
        queue.run(queue.calls.retry_later("later", lease.fence, delay_ms=60_000, message="m"))
    else:
        queue.enqueue("later", body=BODY, delay_ms=60_000)
    assert queue.client.hget(queue.keys.counters, "delayed_tokens") == str(WORK)

    if way == "cancelled":
        queue.run(queue.calls.cancel("later"))
    elif way == "expired":
        queue.pass_deadline(request_id="later")
        queue.tick()
    else:
        queue.client.zadd(queue.keys.delayed, {"later": queue.now_ms() - 1})
        queue.tick()
    assert queue.client.hget(queue.keys.counters, "delayed_tokens") is None


def test_what_an_older_release_promoted_is_forgotten(queue: Queue) -> None:
    """Its tick takes a request out of the set and knows nothing of the tokens."""
    queue.enqueue("later", body=BODY, delay_ms=60_000)
    queue.client.zrem(queue.keys.delayed, "later")
    queue.tick()

    assert queue.client.hget(queue.keys.counters, "delayed_tokens") is None


def test_delayed_tokens_are_counted_again_with_all_others(queue: Queue) -> None:
    for request_id in ("gone", "later"):
        queue.enqueue(request_id, body=BODY, delay_ms=60_000)
    queue.client.delete(queue.keys.record("gone"))
    queue.client.zadd(queue.keys.deadlines, {"gone": 1})
    queue.tick()

    assert queue.client.hget(queue.keys.counters, "delayed_tokens") == str(WORK)
    assert read(queue).backlog_tokens == 0


def test_plain_entries_count_before_anybody_admits_them(queue: Queue) -> None:
    """No worker runs: nothing has a record, and somebody must wake one."""
    for number in range(4):
        queue.client.xadd(queue.keys.ready("2"), {"id": f"plain-{number}", "body": BODY})
    queue.enqueue("known", body=BODY, priority_class="2")
    reading = read(queue)

    assert (reading.queued, reading.plain, reading.waiting) == (1, 4, 5)
    assert reading.waiting_tokens == 5 * WORK


def test_many_plain_entries_are_taken_as_a_sample(queue: Queue) -> None:
    for number in range(PLAIN_LOOK + 44):
        queue.client.xadd(queue.keys.ready("1"), {"id": f"plain-{number}", "body": BODY})
    reading = read(queue)

    assert reading.plain == PLAIN_LOOK + 44
    assert reading.plain_tokens == (PLAIN_LOOK + 44) * WORK


def test_a_tombstone_is_no_work(queue: Queue) -> None:
    queue.enqueue("gone", body=BODY)
    queue.run(queue.calls.cancel("gone"))
    reading = read(queue)

    assert reading.classes["1"].ready == 1  # until a worker reads and drops it
    assert (reading.waiting, reading.waiting_tokens) == (0, 0)


def test_cards_say_what_is_left_and_leases_without_a_card_count_whole(queue: Queue) -> None:
    for number in range(4):
        queue.enqueue(f"r{number}", body=BODY, tenant=f"t{number}")
    queue.lease("one", count=3)
    queue.lease("two", count=1)
    card(queue, "one", state="ready", running=3, remaining_tokens=30, capacity_tokens_per_s=100.0)
    assert read(queue).running_tokens == 30 + WORK  # "two" has no card (yet)

    card(queue, "two", state="ready", running=3, remaining_tokens=50, capacity_tokens_per_s=50.0)
    reading = read(queue)
    assert reading.running_tokens == round(80 * 4 / 6)  # a card from before two of them ended
    assert reading.tokens_per_s == 75.0
    assert set(reading.cards) == {"one", "two"}


def test_in_a_paused_queue_only_what_runs_is_work(queue: Queue) -> None:
    """More workers would not help what waits."""
    queue.leased("runs", body=BODY)
    queue.enqueue("waits", body=BODY)
    queue.enqueue("later", body=BODY, delay_ms=60_000)
    queue.client.xadd(queue.keys.ready("1"), {"id": "plain", "body": BODY})
    assert not read(queue).is_paused
    queue.run(queue.operator.set_pause("pause"))
    reading = read(queue)

    assert reading.is_paused
    assert (reading.waiting_tokens, reading.deferred_tokens) == (3 * WORK, 3 * WORK)
    assert reading.backlog_tokens == reading.running_tokens == WORK

    queue.run(queue.operator.set_pause("resume"))
    reading = read(queue)
    assert not reading.is_paused
    assert reading.backlog_tokens == 3 * WORK


def test_a_paused_partition_does_not_hide_the_work_of_the_others(
    redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    """As between the two calls of an operator who pauses both."""
    parts = [Queue(redis_client, keys, ROOMY) for keys in keyspace.partitions(2)]
    for number, part in enumerate(parts):
        part.enqueue(f"r{number}", body=BODY)
    parts[0].run(parts[0].operator.set_pause("pause"))
    reading = read(*parts)

    assert (reading.waiting_tokens, reading.backlog_tokens) == (2 * WORK, WORK)


@pytest.mark.parametrize(
    ("servers", "fullest"),
    [
        ([(900, 0), (10, 100), (60, 1000)], (10, 100)),
        ([(900, 0), (901, 0)], (901, 0)),
        ([(90, 100), (800, 1000)], (90, 100)),
    ],
)
def test_the_fullest_server_is_the_one_to_look_at(
    servers: list[tuple[int, int]], fullest: tuple[int, int]
) -> None:
    readings = [MemoryReading(*server) for server in servers]

    assert max(readings, key=lambda memory: memory.fullness) == MemoryReading(*fullest)


def test_the_last_known_speed_outlives_the_workers(queue: Queue) -> None:
    queue.client.hset(queue.keys.maintenance, "capacity_tokens_per_s", "123.5")

    assert read(queue).tokens_per_s == 123.5


def test_the_oldest_is_the_first_that_nobody_has_read(queue: Queue) -> None:
    stream = queue.keys.ready("0")
    now_ms = queue.now_ms()
    for age_ms in (90_000, 30_000):
        queue.client.xadd(stream, {"id": f"a{age_ms}", "body": BODY}, id=f"{now_ms - age_ms}-1")
    assert 90 <= read(queue).oldest_s < 95
    queue.read(count=1)
    assert 30 <= read(queue).oldest_s < 35
    assert read(queue).classes["0"].pending == 1


def test_partitions_add_up_and_a_worker_of_several_counts_once(
    redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    parts = [Queue(redis_client, keys, ROOMY) for keys in keyspace.partitions(2)]
    for number, part in enumerate(parts):
        part.enqueue(f"r{number}", body=BODY)
        part.lease("both")
        part.enqueue(f"s{number}", body=BODY)
        card(part, "both", state="ready", running=2, remaining_tokens=17)
    reading = read(*parts)

    assert (reading.queued, reading.leased, reading.waiting_tokens) == (2, 2, 2 * WORK)
    assert reading.running_tokens == 17


def test_an_old_record_without_work_counts_nothing(queue: Queue) -> None:
    """Enqueued by an earlier release."""
    queue.enqueue("old", body=BODY)
    queue.client.hdel(queue.keys.record("old"), "work")
    queue.client.hset(queue.keys.counters, "queued_tokens", 0)
    (lease,) = queue.lease()
    run(queue.client, queue.calls.hand_over(lease.request_id, lease.fence))
    reading = read(queue)

    assert (reading.queued, reading.waiting_tokens) == (1, 0)
