"""Renewing leases, noticing lost ones, and pausing work that cannot be renewed."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from support_worker import make_output
from support_worker_bench import WORKER, Bench, Flaky, running, until
from tokenmill.keys import GROUP
from tokenmill.scripts import arun
from tokenmill_worker.health import Loops
from tokenmill_worker.heartbeat import Heartbeat


def make_heartbeat(bench: Bench, pauses: list[bool], lease_s: float = 10.0) -> Heartbeat:
    return Heartbeat(
        redis=bench.redis,
        calls=bench.calls,
        deliveries=bench.deliveries,
        publisher=bench.publisher,
        retrier=bench.retrier,
        health=Loops(stale_after_s=10.0),
        worker_id=WORKER,
        interval_s=0.001,
        lease_s=lease_s,
        on_lost=bench._lose,
        pause=pauses.append,
    )


async def idle_ms(bench: Bench) -> int:
    (entry,) = await bench.redis.xpending_range(bench.keys.ready("1"), GROUP, "-", "+", 10)
    return int(entry["time_since_delivered"])


async def test_a_beat_renews_the_lease(bench: Bench) -> None:
    await bench.deliver("request-1")
    heartbeat = make_heartbeat(bench, [])
    stream, (entry,) = bench.keys.ready("1"), await _pending(bench)
    await bench.redis.xclaim(stream, GROUP, WORKER, 0, [entry], idle=5000, justid=True)
    assert await idle_ms(bench) >= 5000

    await heartbeat.beat()

    assert await idle_ms(bench) < 5000
    assert bench.lost == []


async def test_a_lost_lease_is_noticed_and_not_stolen_back(bench: Bench) -> None:
    lost, kept = await bench.deliver("request-1", "request-2")
    await arun(bench.redis, bench.calls.cancel("request-1"))

    await make_heartbeat(bench, []).beat()

    assert bench.lost == [lost]
    assert list(bench.deliveries) == [kept]


async def test_the_end_of_a_lease_by_its_own_finish_is_no_loss(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    delivery.finishing = True
    await arun(bench.redis, bench.calls.cancel("request-1"))

    await make_heartbeat(bench, []).beat()

    assert bench.lost == []


async def test_a_shorter_log_is_repaired(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    async with running(bench.publisher.run()):
        for token in range(3):
            delivery.pending = [make_output(token)]
            await bench.publisher.settle()
        await bench.lose_log_after("request-1", 1)

        await make_heartbeat(bench, []).beat()
        assert delivery.acked == 1
        await bench.publisher.settle()

    assert [event["k"] for event in await bench.log("request-1")] == [[0], [1], [2]]


async def test_work_pauses_when_renewals_fail_and_goes_on_afterwards(bench: Bench) -> None:
    flaky = Flaky(bench.redis)
    flaky.fail_before = 10_000
    pauses: list[bool] = []
    await bench.deliver("request-1")
    heartbeat = make_heartbeat(bench, pauses, lease_s=0.05)
    heartbeat.redis = flaky  # type: ignore[assignment]

    async with running(heartbeat.run()):
        await until(lambda: True in pauses)
        assert pauses[0] is False
        flaky.fail_before = 0
        await until(lambda: pauses[-1] is False)


async def test_an_error_that_does_not_pass_ends_the_loop(bench: Bench) -> None:
    await bench.deliver("request-1")
    await bench.redis.delete(bench.keys.owners)
    await bench.redis.set(bench.keys.owners, "not a hash")

    with pytest.raises(ResponseError):
        await make_heartbeat(bench, []).beat()


async def _pending(bench: Bench) -> list[str]:
    entries = await bench.redis.xpending_range(bench.keys.ready("1"), GROUP, "-", "+", 10)
    return [entry["message_id"] for entry in entries]
