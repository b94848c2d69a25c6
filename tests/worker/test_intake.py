"""From a lease to the engine, and what keeps a request from getting there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from support_worker import FakeEngine, make_delivery, make_output
from support_worker_bench import Bench, running, until
from tokenmill.calls import AppendEvent
from tokenmill.replies import STORED
from tokenmill.scripts import arun
from tokenmill_worker.delivery import Delivery
from tokenmill_worker.dispatcher import Dispatcher
from tokenmill_worker.engine_thread import EngineThread
from tokenmill_worker.intake import LOGS_AT_A_TIME, Identity, Intake

IDENTITY = Identity("worker-1", ("model",), "new-model")


@dataclass
class Front:
    bench: Bench
    intake: Intake
    dispatcher: Dispatcher
    thread: EngineThread

    async def deliver_again(self, fingerprint: str = "") -> Delivery:
        """A request whose first attempt, on `fingerprint`, published two tokens and was drained."""
        bench = self.bench
        await bench.enqueue("request-1")
        (first,) = await bench.deliver_with(fingerprint)
        first.start("worker-0")
        first.pending = [make_output(4, 5, text="x")]
        async with running(bench.publisher.run()):
            await bench.publisher.settle()
        bench.deliveries.remove(first)
        await arun(bench.redis, bench.calls.hand_over("request-1", first.lease.fence))
        (second,) = await bench.deliver_with("new-model", ready_class="r")
        return second


@pytest.fixture
async def front(bench: Bench) -> AsyncIterator[Front]:
    engine = FakeEngine()
    thread = EngineThread(lambda _on_phase: engine, lambda _phase: None)
    await thread.load()
    dispatcher = Dispatcher(bench.deliveries, thread, bench.metrics)
    intake = Intake(
        redis=bench.redis,
        keys=bench.keys,
        deliveries=bench.deliveries,
        dispatcher=dispatcher,
        engine=engine,
        engine_thread=thread,
        retrier=bench.retrier,
        identity=IDENTITY,
    )
    yield Front(bench, intake, dispatcher, thread)
    await thread.stop(5)


async def run_to_the_end(front: Front, delivery: Delivery) -> dict[str, object]:
    async with running(front.bench.publisher.run(), front.dispatcher.run()):
        await front.intake.admit(delivery)
        await until(lambda: front.bench.ended)
    return (await front.bench.log("request-1"))[-1]


async def test_a_request_continues_behind_what_was_published(front: Front) -> None:
    delivery = await front.deliver_again()

    end = await run_to_the_end(front, delivery)

    log = await front.bench.log("request-1")
    assert log[2] == {"e": 3, "ev": "start", "i": 2, "w": "worker-1", "a": 2}
    assert log[3]["i"] == 2
    assert (end["st"], end["n"]) == ("done", 256)


@pytest.mark.parametrize(("any_model", "status"), [(True, "done"), (False, "failed")])
async def test_another_model_may_continue_unless_the_policy_is_strict(
    front: Front, any_model: bool, status: str
) -> None:
    intake = replace(front.intake, identity=replace(IDENTITY, resume_any_model=any_model))
    front.intake = intake
    delivery = await front.deliver_again(fingerprint="old-model")

    end = await run_to_the_end(front, delivery)

    assert end["st"] == status
    assert end.get("code") == (None if any_model else "model_changed")


async def test_the_same_model_continues_under_the_strict_policy(front: Front) -> None:
    front.intake = replace(front.intake, identity=replace(IDENTITY, resume_any_model=False))
    delivery = await front.deliver_again(fingerprint="new-model")

    assert (await run_to_the_end(front, delivery))["st"] == "done"


async def test_a_log_that_no_worker_wrote_ends_the_request(front: Front) -> None:
    delivery = await front.deliver_again()
    log = front.bench.keys.log("request-1")
    await front.bench.redis.xadd(log, {"d": '{"e":3,"i":7,"k":[1]}'}, id="3-0")

    end = await run_to_the_end(front, delivery)

    assert (end["e"], end["code"]) == (4, "resume_mismatch")


async def test_a_refused_body_ends_behind_earlier_events(front: Front) -> None:
    delivery = await front.deliver_again()
    delivery.lease = replace(delivery.lease, body="{")

    end = await run_to_the_end(front, delivery)

    assert (end["e"], end["code"], end["msg"]) == (
        3,
        "invalid_request",
        "body: must be a JSON object",
    )


async def test_an_unforeseen_error_ends_only_its_request(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_text: str) -> list[int]:
        raise RuntimeError("canary")

    monkeypatch.setattr(front.intake.engine.tokenizer, "encode", fail)
    (delivery,) = await front.bench.deliver("request-1")

    end = await run_to_the_end(front, delivery)

    assert (end["code"], end["msg"]) == ("internal", "the worker failed on this request")
    assert "canary" not in caplog.text


async def test_what_was_dropped_meanwhile_is_not_submitted(front: Front) -> None:
    (delivery,) = await front.bench.deliver("request-1")
    front.bench.deliveries.remove(delivery)

    await front.intake.admit(delivery)

    assert delivery.events == []
    assert front.thread.events.empty()


async def test_a_held_request_is_dropped_at_its_deadline(front: Front) -> None:
    (delivery,) = await front.bench.deliver("request-1")
    front.bench.deliveries.remove(delivery)
    delivery.lease = replace(delivery.lease, remaining_ms=5)

    front.dispatcher.hold(delivery)
    assert delivery in front.bench.deliveries
    await until(lambda: delivery not in front.bench.deliveries)

    assert front.bench.metrics.leases_lost["deadline"]._value.get() == 1


class CountingRedis:
    """Answers like an empty log, and counts who waits at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def xrange(self, *_: object, **__: object) -> list[object]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return []


async def test_the_logs_of_a_dead_peer_are_read_some_at_a_time(front: Front) -> None:
    """redis-py refuses the 101st connection, and each read takes one."""
    redis = CountingRedis()
    intake = replace(front.intake, redis=redis)
    inherited = [make_delivery(request_id=f"request-{n}", num_events=1) for n in range(200)]

    await asyncio.gather(*(intake.admit(delivery) for delivery in inherited))

    assert redis.most == LOGS_AT_A_TIME


async def test_suspects_begin_one_after_another(front: Front) -> None:
    """Each has its start event stored before the engine sees it, and a token before the next."""
    suspects = [(await front.bench.deliver(f"suspect-{i}"))[0] for i in range(3)]
    for delivery in suspects:
        delivery.lease = replace(delivery.lease, strikes=1)
    innocent = (await front.bench.deliver("innocent"))[0]
    submitted: list[str] = []
    submit = front.thread.submit
    front.thread.submit = lambda request: submitted.append(request.attempt_id)  # type: ignore[method-assign]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(front.intake.admit(d)) for d in [*suspects, innocent]]
        await until(lambda: innocent.attempt_id in submitted)
        assert [len(delivery.events) for delivery in suspects] == [1, 0, 0]
        assert submitted == [innocent.attempt_id]  # the start event is not stored yet
        async with running(front.bench.publisher.run()):
            await until(lambda: suspects[0].attempt_id in submitted)
            assert [len(delivery.events) for delivery in suspects] == [1, 0, 0]
            front.bench.deliveries.remove(suspects[0])  # gone without a token: the next may begin
            await until(lambda: suspects[1].attempt_id in submitted)
            suspects[1].pending = [make_output(4)]
            front.bench.deliveries.unwritten.set()
            await until(lambda: suspects[2].attempt_id in submitted)
        for task in tasks:
            task.cancel()
    front.thread.submit = submit  # type: ignore[method-assign]


async def test_a_suspect_begins_although_the_reply_to_its_start_event_was_lost(
    front: Front,
) -> None:
    (suspect,) = await front.bench.deliver("suspect-1")
    suspect.lease = replace(suspect.lease, strikes=1)

    admission = asyncio.create_task(front.intake.admit(suspect))
    await until(lambda: suspect.events)
    event = AppendEvent("suspect-1", suspect.lease.fence, 1, suspect.events[0])
    assert await arun(front.bench.redis, front.bench.calls.append([event])) == [STORED]

    async with running(front.bench.publisher.run(), front.dispatcher.run()):
        await admission
        await until(lambda: front.bench.ended)
    assert (await front.bench.log("suspect-1"))[-1]["st"] == "done"
