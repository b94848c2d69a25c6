"""Writing events: order, coalescing, repair and every code that Redis may answer."""

from __future__ import annotations

import pytest

from support_worker import make_output
from support_worker_bench import Bench, Flaky, running, until
from tokenmill import limits
from tokenmill.scripts import arun
from tokenmill_engine.outputs import TokenLogprobs
from tokenmill_worker.delivery import Ending

DONE = Ending(status="done", finish_reason="length")


async def test_tokens_that_came_together_share_an_event(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    delivery.start("worker-1")
    delivery.pending = [make_output(4), make_output(5, 6)]

    async with running(bench.publisher.run()):
        await bench.publisher.settle()
        delivery.pending = [make_output(7)]
        await bench.publisher.settle()

    assert await bench.log("request-1") == [
        {"e": 1, "ev": "start", "i": 0, "w": "worker-1", "a": 1},
        {"e": 2, "i": 0, "k": [4, 5, 6], "t": "efg", "a": 1},
        {"e": 3, "i": 3, "k": [7], "t": "h", "a": 1},
    ]
    assert delivery.acked == 3


async def test_what_comes_during_a_call_goes_into_the_next_one(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    flaky = Flaky(bench.redis)
    bench.publisher._redis = flaky  # type: ignore[assignment]
    flaky.fail_before = 3
    delivery.pending = [make_output(1)]

    async with running(bench.publisher.run()):
        bench.deliveries.unwritten.set()
        await until(lambda: flaky.num_calls >= 2)
        for token in (2, 3, 4):
            delivery.pending.append(make_output(token))
            bench.deliveries.unwritten.set()
        await bench.publisher.settle()

    assert [event["k"] for event in await bench.log("request-1")] == [[1], [2, 3, 4]]


async def test_a_lost_reply_stores_nothing_twice(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    flaky = Flaky(bench.redis)
    bench.publisher._redis = flaky  # type: ignore[assignment]
    delivery.pending = [make_output(1)]
    delivery.ending = DONE
    flaky.fail_after = 1

    async with running(bench.publisher.run()):
        bench.deliveries.unwritten.set()
        await until(lambda: delivery.acked == 1)
        flaky.fail_after = 1  # the reply to finish
        await until(lambda: bench.ended)

    log = await bench.log("request-1")
    assert [event.get("k", event.get("ev")) for event in log] == [[1], "end"]


async def test_the_end_comes_last_and_once(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    delivery.pending = [make_output(1), make_output(2)]
    delivery.ending = DONE

    async with running(bench.publisher.run()):
        await bench.publisher.settle()

    assert bench.ended == [(delivery, DONE)]
    log = await bench.log("request-1")
    assert [event["e"] for event in log] == [1, 2]
    assert (log[-1]["ev"], log[-1]["n"]) == ("end", 2)
    record = await bench.redis.hgetall(bench.keys.record("request-1"))
    assert record["state"] == "done"
    assert "body" not in record


async def test_a_lost_lease_drops_the_request_and_no_other(bench: Bench) -> None:
    lost, kept = await bench.deliver("request-1", "request-2")
    await arun(bench.redis, bench.calls.cancel("request-1"))
    lost.pending, kept.pending = [make_output(1)], [make_output(2)]

    async with running(bench.publisher.run()):
        await bench.publisher.settle()

    assert bench.lost == [lost]
    assert [event["k"] for event in await bench.log("request-2")] == [[2]]


async def test_a_cancel_during_the_end_drops_the_request(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    delivery.ending = DONE
    await arun(bench.redis, bench.calls.cancel("request-1"))

    async with running(bench.publisher.run()):
        await bench.publisher.settle()

    assert (bench.lost, bench.ended) == ([delivery], [])
    assert [event["st"] for event in await bench.log("request-1")] == ["cancelled"]


@pytest.mark.parametrize("kept_events", [1, 2])
async def test_a_log_that_lost_its_end_is_repaired(bench: Bench, kept_events: int) -> None:
    (delivery,) = await bench.deliver("request-1")
    async with running(bench.publisher.run()):
        for token in range(4):
            delivery.pending = [make_output(token)]
            await bench.publisher.settle()
        await bench.lose_log_after("request-1", kept_events)
        delivery.pending = [make_output(4)]
        delivery.ending = DONE
        await bench.publisher.settle()

    log = await bench.log("request-1")
    assert [event["e"] for event in log] == [1, 2, 3, 4, 5, 6]
    assert [event["k"] for event in log[:-1]] == [[0], [1], [2], [3], [4]]
    assert bench.metrics.log_repairs._value.get() == 1


async def test_an_end_that_finds_events_missing_waits_for_their_repair(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    async with running(bench.publisher.run()):
        for token in range(3):
            delivery.pending = [make_output(token)]
            await bench.publisher.settle()
        await bench.lose_log_after("request-1", 1)
        delivery.ending = DONE
        await bench.publisher.settle()

    assert [event["e"] for event in await bench.log("request-1")] == [1, 2, 3, 4]
    assert bench.ended


async def test_more_events_than_one_call_may_carry(bench: Bench) -> None:
    count = limits.MAX_REQUESTS_PER_APPEND + 5
    (delivery,) = await bench.deliver("request-1")
    for number in range(count):
        delivery.add_event(i=number, k=[number], t="")

    async with running(bench.publisher.run()):
        await bench.publisher.settle()

    assert [event["k"] for event in await bench.log("request-1")] == [[n] for n in range(count)]
    assert delivery.acked == count


async def test_logprobs_are_written_with_their_texts(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    position = TokenLogprobs((1, 2), (-0.5, -1.0), (1, 2))
    delivery.pending = [make_output(1, logprobs=(position,))]

    async with running(bench.publisher.run()):
        await bench.publisher.settle()

    (event,) = await bench.log("request-1")
    assert event["lp"] == [[[1, -0.5, 1, "b"], [2, -1.0, 2, "c"]]]


async def test_an_error_that_does_not_pass_ends_the_loop(bench: Bench) -> None:
    (delivery,) = await bench.deliver("request-1")
    await bench.redis.delete(bench.keys.owners)
    await bench.redis.set(bench.keys.owners, "not a hash")
    delivery.pending = [make_output(1)]
    bench.deliveries.unwritten.set()

    with pytest.raises(Exception, match="WRONGTYPE"):
        await bench.publisher.run()
