"""The asyncio client against a worker double: over fakeredis and over a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from support_redis import RedisBackend
from support_sdk import IDS, PIECES, TEXT
from support_waiting import await_until
from tokenmill import (
    AsyncClient,
    Client,
    ConfigurationError,
    DeadlineExceeded,
    EndEvent,
    QueueFull,
    RequestCancelled,
    RequestConflict,
    RequestFailed,
    ResultTimeout,
    StartEvent,
    TokenEvent,
    UnknownRequest,
)
from tokenmill._cancellation import keep_cancellation
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker


@pytest.fixture
async def client(redis_backend: RedisBackend, keyspace: Keyspace) -> AsyncIterator[AsyncClient]:
    async with (
        redis_backend.async_client() as connection,
        AsyncClient(redis=connection, namespace=keyspace.namespace) as client,
    ):
        yield client


async def test_generate_and_chat_return_the_whole_answer(
    client: AsyncClient, running_worker: FakeWorker
) -> None:
    completion = await client.generate("Once upon a time", meta={"order": 7})
    assert completion.text == TEXT
    assert completion.token_ids == IDS
    assert completion.meta == {"order": 7}
    assert (await client.chat([{"role": "user", "content": "Hi"}])).text == TEXT


async def test_a_stream_hands_out_each_token_as_it_comes(
    client: AsyncClient, worker: FakeWorker
) -> None:
    async with client.stream("x") as stream:
        texts = aiter(stream)
        for piece in PIECES:
            worker.step()
            assert await anext(texts) == piece  # the worker has not gone further than this
            assert not stream.finished
        worker.step()
        assert [text async for text in texts] == []
        assert (await stream.completion()).text == TEXT


async def test_live_messages_need_no_reading_of_the_log(
    client: AsyncClient, worker: FakeWorker
) -> None:
    async with client.stream("x") as stream:
        texts = aiter(stream)
        worker.step()
        await anext(texts)
        reads = stream._state.stats.reads
        for _ in PIECES:
            worker.step()
        assert [text async for text in texts] == PIECES[1:]
        assert stream._state.stats.reads == reads


async def test_events_come_once_and_in_order(
    client: AsyncClient, running_worker: FakeWorker
) -> None:
    async with client.stream("x") as stream:
        events: list[Any] = [event async for event in stream.events()]
    assert [event.seq for event in events] == list(range(1, len(PIECES) + 3))
    assert [type(event) for event in events] == [
        StartEvent, *[TokenEvent] * len(PIECES), EndEvent,
    ]  # fmt: skip


async def test_attach_behind_an_event(client: AsyncClient, worker: FakeWorker) -> None:
    handle = await client.submit("x")
    for _ in range(3):
        worker.step()
    async with client.attach(handle.id) as stream:
        texts = aiter(stream)
        first = [await anext(texts), await anext(texts)]
    assert (await client.status(handle.id)).state == "leased"
    while worker.step():
        pass
    resumed = client.attach(handle.id, after=stream.last_seq)
    assert first + [text async for text in resumed] == PIECES
    assert (await resumed.completion()).text == TEXT


async def test_leaving_a_stream_early_cancels_the_request(
    client: AsyncClient, worker: FakeWorker
) -> None:
    async with client.stream("x") as stream:
        worker.step()
        assert await anext(aiter(stream)) == PIECES[0]
    assert (await client.status(stream.id)).state == "cancelled"


async def test_a_cancelled_task_cancels_its_request(
    client: AsyncClient, worker: FakeWorker
) -> None:
    task = asyncio.create_task(client.generate("x"))
    await await_until(lambda: worker.step() and worker.running)
    (request_id,) = worker.running
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.status(request_id)).state == "cancelled"


async def test_a_swallowed_cancellation_is_raised_all_the_same() -> None:
    async def swallow() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done"
        raise AssertionError("not reached")

    task = asyncio.create_task(keep_cancellation(swallow()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await keep_cancellation(asyncio.sleep(0, "kept")) == "kept"


async def test_cancel_in_the_queue_and_in_mid_stream(
    client: AsyncClient, worker: FakeWorker
) -> None:
    handle = await client.submit("x")
    assert await client.cancel(handle.id) is True
    assert await client.cancel(handle.id) is False
    with pytest.raises(RequestCancelled):
        await client.result(handle.id)
    async with client.stream("x") as stream:
        texts = aiter(stream)
        worker.step()
        assert await anext(texts) == PIECES[0]
        assert await stream.cancel() is True
        with pytest.raises(RequestCancelled) as caught:
            await anext(texts)
    assert caught.value.completion is not None
    assert caught.value.completion.text == PIECES[0]


async def test_the_deadline_ends_a_request(client: AsyncClient, worker: FakeWorker) -> None:
    handle = await client.submit("x", deadline_s=0.02)
    while (await client.status(handle.id)).state != "expired":
        worker.tick()
    with pytest.raises(DeadlineExceeded):
        await client.result(handle.id)


async def test_unknown_ids_and_results_that_are_not_there(
    client: AsyncClient, worker: FakeWorker
) -> None:
    for ask in (client.status, client.cancel, client.result):
        with pytest.raises(UnknownRequest):
            await ask("nobody")
    handle = await client.submit("x")
    with pytest.raises(ResultTimeout):
        await client.result(handle.id, timeout_s=0.01)
    assert (await client.status(handle.id)).state == "queued"


async def test_resubmission_and_conflict(client: AsyncClient, running_worker: FakeWorker) -> None:
    assert (await client.submit("x", request_id="once")).is_new
    assert not (await client.submit("x", request_id="once")).is_new
    assert (await client.generate("x", request_id="once")).text == TEXT
    with pytest.raises(RequestConflict):
        await client.submit("y", request_id="once")


async def test_a_full_queue(redis_backend: RedisBackend, keyspace: Keyspace) -> None:
    policy = QueuePolicy(max_queued=0)
    async with (
        redis_backend.async_client() as connection,
        AsyncClient(redis=connection, namespace=keyspace.namespace, policy=policy) as client,
    ):
        with pytest.raises(QueueFull):
            await client.generate("x")


@pytest.mark.parametrize("fate", ["lost", "twice", "reordered"])
async def test_what_becomes_of_messages_does_not_matter(
    client: AsyncClient, running_worker: FakeWorker, fate: str
) -> None:
    dice, listener = random.Random(7), client._link._partitions.home_of("x").listener
    deliver, held = listener._subscribers.dispatch, list[dict[str, Any]]()

    def unreliable(message: dict[str, Any]) -> None:
        if message["type"] != "message" or dice.random() > 0.3:
            deliver(message)
            while held:
                deliver(held.pop())
        elif fate == "twice":
            deliver(message)
            deliver(message)
        elif fate == "reordered":
            held.append(message)

    listener._subscribers.dispatch = unreliable  # type: ignore[method-assign]
    completions = await asyncio.gather(*(client.generate("x") for _ in range(8)))
    assert [completion.token_ids for completion in completions] == [IDS] * 8


async def test_many_streams_share_one_subscription(
    client: AsyncClient, redis_client: redis.Redis, running_worker: FakeWorker
) -> None:
    async def text() -> str:
        return "".join([text async for text in client.stream("x")])

    assert await asyncio.gather(*(text() for _ in range(64))) == [TEXT] * 64
    anchor = client.keys.channel("")
    assert redis_client.pubsub_numsub(anchor) == [(anchor, 1)]


async def test_map_keeps_the_order_and_the_window(
    client: AsyncClient, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    taken: list[int] = []

    def prompts() -> Any:
        for number in range(12):
            taken.append(number)
            yield f"number {number}"

    with FakeWorker(redis_client, str, namespace=keyspace.namespace):
        answers = client.map(prompts(), concurrency=3)
        assert (await anext(answers)).text == "number 0"
        assert len(taken) == 3
        rest = [answer.text async for answer in answers]
    assert rest == [f"number {number}" for number in range(1, 12)]


async def test_map_raises_a_failure_or_hands_it_over(
    client: AsyncClient, redis_client: redis.Redis, keyspace: Keyspace
) -> None:
    def answer(prompt: Any) -> str:
        return str(1 // int(prompt))

    failures: list[RequestFailed] = []

    def note(error: RequestFailed) -> Any:
        failures.append(error)
        return error.completion

    with FakeWorker(redis_client, answer, namespace=keyspace.namespace):
        with pytest.raises(RequestFailed):
            [_ async for _ in client.map(["1", "0", "1"])]
        reasons = [a.finish_reason async for a in client.map(["1", "0", "1"], on_failure=note)]
    assert reasons == ["stop", None, "stop"]
    assert [error.code for error in failures] == ["internal"]


async def test_closing_ends_the_task_and_the_streams(
    redis_backend: RedisBackend, keyspace: Keyspace, redis_client: redis.Redis
) -> None:
    before = asyncio.all_tasks()
    async with redis_backend.async_client() as connection:
        client = AsyncClient(redis=connection, namespace=keyspace.namespace)
        stream = client.stream("x")
        reading = asyncio.create_task(stream.completion())
        anchor = client.keys.channel("")
        await await_until(lambda: redis_client.pubsub_numsub(anchor) == [(anchor, 1)])
        await client.aclose()
        await client.aclose()
        with pytest.raises(RuntimeError, match="closed"):
            await reading
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate("x")
        assert asyncio.all_tasks() == before
        if redis_backend.name != "fakeredis":  # which forgets no subscriber of a closed connection
            await await_until(lambda: redis_client.pubsub_numsub(anchor) == [(anchor, 0)])


def test_a_client_belongs_to_one_event_loop(fake: RedisBackend, keyspace: Keyspace) -> None:
    client = AsyncClient(redis=fake.async_client(), namespace=keyspace.namespace)
    asyncio.run(client.submit("x"))
    with pytest.raises(ConfigurationError, match="event loop"):
        asyncio.run(client.submit("x"))


async def test_sync_and_async_clients_speak_of_the_same_requests(
    client: AsyncClient, redis_client: redis.Redis, keyspace: Keyspace, running_worker: FakeWorker
) -> None:
    with Client(redis=redis_client, namespace=keyspace.namespace) as other:
        handle = other.submit("x")
        assert (await client.result(handle.id)).text == TEXT
