"""Fetching: the order of classes, capacity, entries without a record, entries lost on the way."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from support_worker_bench import WORKER, Bench, running, until
from tokenmill.keys import GROUP
from tokenmill.ready import acreate_groups
from tokenmill.scripts import arun
from tokenmill_worker.consumer import Consumer
from tokenmill_worker.delivery import Delivery
from tokenmill_worker.health import Loops
from tokenmill_worker.intake import Identity
from tokenmill_worker.places import Places


def make_consumer(
    bench: Bench, capacity: Callable[[], int], *, aging_ms: int = 10_000
) -> tuple[Consumer, list[Delivery]]:
    taken: list[Delivery] = []

    def take(delivery: Delivery) -> None:
        taken.append(delivery)
        bench.deliveries.add(delivery)

    consumer = Consumer(
        redis=bench.redis,
        calls=bench.calls,
        deliveries=bench.deliveries,
        identity=Identity(WORKER, ("model",), "fingerprint"),
        places=Places(capacity),
        aging_ms=aging_ms,
        on_lease=take,
        retrier=bench.retrier,
        metrics=bench.metrics,
        health=Loops(stale_after_s=10.0),
    )
    return consumer, taken


def ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.lease.request_id for delivery in deliveries]


async def test_urgent_work_is_fetched_first(server_bench: Bench) -> None:
    bench = server_bench
    for number in range(3):
        await bench.enqueue(f"normal-{number}", "1")
    await bench.enqueue("high-0", "0")
    await bench.redis.xadd(bench.keys.ready("r"), {"id": "nobody"})
    consumer, taken = make_consumer(bench, lambda: 2 - len(bench.deliveries))

    async with running(consumer.run()):
        await until(lambda: len(taken) == 2)

        assert ids(taken) == ["high-0", "normal-0"]
        assert consumer.health.is_full
        bench.deliveries.remove(taken[0])
        await until(lambda: len(taken) == 3)
        assert ids(taken)[2] == "normal-1"


async def test_low_priority_is_served_too(server_bench: Bench) -> None:
    bench = server_bench
    await bench.enqueue("low-0", "2")
    consumer, taken = make_consumer(bench, lambda: 8 - len(bench.deliveries))

    async with running(consumer.run()):
        await until(lambda: taken)

    assert ids(taken) == ["low-0"]


@pytest.mark.parametrize(("aging_ms", "first"), [(10_000, "high-0"), (1, "low-0")])
async def test_low_priority_is_served_before_new_urgent_work_once_it_has_waited(
    server_bench: Bench, aging_ms: int, first: str
) -> None:
    bench = server_bench
    await bench.enqueue("low-0", "2")
    entry = (await bench.redis.xrange(bench.keys.ready("2")))[0][0]
    while await server_ms(bench) < int(entry.partition("-")[0]) + 10:
        pass
    await bench.enqueue("high-0", "0")
    consumer, taken = make_consumer(bench, lambda: 1 - len(bench.deliveries), aging_ms=aging_ms)

    async with running(consumer.run()):
        await until(lambda: taken)

    assert ids(taken) == [first]


async def server_ms(bench: Bench) -> int:
    seconds, microseconds = await bench.redis.time()
    return seconds * 1000 + microseconds // 1000


async def test_a_read_that_brings_more_than_there_is_room_for_gives_the_rest_back(
    server_bench: Bench,
) -> None:
    bench = server_bench
    for ready_class in ("0", "1", "2"):
        await bench.enqueue(f"class-{ready_class}", ready_class)
    consumer, taken = make_consumer(bench, lambda: 1 - len(bench.deliveries))
    consumer._is_idle = True  # as if they had come together, just before a blocking read

    async with running(consumer.run()):
        await until(lambda: consumer.health.is_full)

    assert ids(taken) == ["class-0"]
    assert await bench.redis.xlen(bench.keys.ready("r")) == 2
    for ready_class in ("1", "2"):
        assert await bench.redis.xlen(bench.keys.ready(ready_class)) == 0
        record = bench.keys.record(f"class-{ready_class}")
        assert await bench.redis.hget(record, "state") == "queued"


async def test_resumed_work_is_left_to_the_peers_for_a_while(server_bench: Bench) -> None:
    bench = server_bench
    (delivery,) = await bench.deliver("given-back")
    bench.deliveries.remove(delivery)
    lease = delivery.lease
    await arun(bench.redis, bench.calls.hand_over(lease.request_id, lease.fence))
    await bench.enqueue("new-0", "2")
    consumer, taken = make_consumer(bench, lambda: 8 - len(bench.deliveries))
    consumer.leave_resumed(3600)

    async with running(consumer.run()):
        await until(lambda: taken)
        await until(lambda: consumer._is_idle)
        assert ids(taken) == ["new-0"]
        consumer.leave_resumed(0)
        await until(lambda: len(taken) == 2)


async def test_what_was_delivered_but_never_seen_is_taken(server_bench: Bench) -> None:
    bench = server_bench
    await acreate_groups(bench.redis, bench.keys)
    await bench.enqueue("unseen-0")
    await bench.redis.xreadgroup(GROUP, WORKER, {bench.keys.ready("1"): ">"})  # the reply is lost
    consumer, taken = make_consumer(bench, lambda: 8 - len(bench.deliveries))

    async with running(consumer.run()):
        await until(lambda: taken)

    assert ids(taken) == ["unseen-0"]
    assert taken[0].lease.attempt == 1


async def test_a_reconnect_takes_nothing_twice(server_bench: Bench) -> None:
    bench = server_bench
    await bench.enqueue("request-1")
    consumer, taken = make_consumer(bench, lambda: 8 - len(bench.deliveries))

    async with running(consumer.run()):
        await until(lambda: taken)
    again, taken_again = make_consumer(bench, lambda: 8 - len(bench.deliveries))
    await bench.enqueue("request-2")
    async with running(again.run()):
        await until(lambda: taken_again)

    assert ids(taken_again) == ["request-2"]


async def test_lost_groups_are_made_again(server_bench: Bench) -> None:
    bench = server_bench
    consumer, taken = make_consumer(bench, lambda: 8 - len(bench.deliveries))

    async with running(consumer.run()):
        await until(lambda: consumer.health.last_fetch_s > 0)
        await bench.redis.delete(*bench.keys.ready_streams.values())
        await bench.enqueue("request-1")
        await until(lambda: taken)

    assert ids(taken) == ["request-1"]


async def test_a_plain_entry_gets_a_record_and_is_leased(server_bench: Bench) -> None:
    bench = server_bench
    body = json.dumps({"prompt": "x"})
    await bench.redis.xadd(bench.keys.ready("1"), {"id": "plain-1", "body": body, "tenant": "a"})
    await bench.redis.xadd(bench.keys.ready("1"), {"id": "plain 2", "body": body})
    await bench.redis.xadd(bench.keys.ready("1"), {"neither": "nor"})
    consumer, taken = make_consumer(bench, lambda: 8 - len(bench.deliveries))

    async with running(consumer.run()):
        await until(lambda: bench.metrics.entries_dropped._value.get() == 2)
        await until(lambda: taken)

    assert ids(taken) == ["plain-1"]
    assert (taken[0].lease.body, taken[0].lease.tenant) == (body, "a")
    assert await bench.redis.xlen(bench.keys.ready("1")) == 1


async def test_stopping_ends_the_loop_and_leaves_the_queue_alone(server_bench: Bench) -> None:
    bench = server_bench
    consumer, taken = make_consumer(bench, lambda: 8 - len(bench.deliveries))
    consumer.stop()
    await bench.enqueue("request-1")

    await consumer.run()

    assert taken == []
    assert await bench.redis.xlen(bench.keys.ready("1")) == 1
