"""What becomes of a request, and of the listening for it, when nobody reads its stream any more."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from support_redis import RedisBackend
from support_sdk import PIECES, TEXT
from support_waiting import await_until, wait_until
from tokenmill import AsyncClient, AsyncTokenStream, Client
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker


@pytest.fixture
async def async_client(
    redis_backend: RedisBackend, keyspace: Keyspace
) -> AsyncIterator[AsyncClient]:
    async with (
        redis_backend.async_client() as connection,
        AsyncClient(redis=connection, namespace=keyspace.namespace) as client,
    ):
        yield client


def channels(connection: redis.Redis, keys: Keyspace) -> list[str]:
    """Of single requests, that somebody listens to."""
    anchor = keys.channel("")
    return [name for name in connection.pubsub_channels(f"{anchor}*") if name != anchor]


def test_a_block_left_early_may_leave_the_request_running(
    client: Client, redis_client: redis.Redis, worker: FakeWorker
) -> None:
    with client.stream("x", cancel_on_exit=False) as stream:
        worker.step()
        first = next(iter(stream))
    wait_until(lambda: channels(redis_client, client.keys) == [])
    assert client.status(stream.id).state == "leased"
    while worker.step():
        pass
    assert [first, *client.attach(stream.id, after=stream.last_seq)] == PIECES


def test_an_iteration_left_early_may_leave_the_request_running(
    client: Client, redis_client: redis.Redis, worker: FakeWorker
) -> None:
    stream = client.stream("x", cancel_on_exit=False)
    with ThreadPoolExecutor(1) as pool:
        texts = iter(stream)
        first = pool.submit(next, texts)
        wait_until(worker.step)
        assert first.result() == PIECES[0]
    del texts
    wait_until(lambda: channels(redis_client, client.keys) == [])
    assert client.status(stream.id).state == "leased"


@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_without_a_word_only_the_listening_ends(
    client: Client, redis_client: redis.Redis, redis_backend: RedisBackend, how: str
) -> None:
    client.submit("first")  # fakeredis keeps the traceback of its first NOSCRIPT error
    stream = client.stream("x")
    request_id = stream.id
    stream.__enter__()
    wait_until(lambda: channels(redis_client, client.keys) == [client.keys.channel(request_id)])
    if how == "closed":
        client.close()
        stream.close()
    else:
        del stream
        gc.collect()
        assert client.status(request_id).state == "queued"
    # fakeredis forgets no subscriber of a closed connection
    if how == "forgotten" or redis_backend.name != "fakeredis":
        wait_until(lambda: channels(redis_client, client.keys) == [])
    assert redis_client.hget(client.keys.record(request_id), "state") == "queued"


def test_a_stream_may_end_while_its_own_thread_holds_the_listener(
    client: Client, redis_client: redis.Redis
) -> None:
    """The garbage collector ends streams wherever the thread happens to be."""
    listener = client._link._partitions.home_of("x").listener
    with client.stream("x") as stream:
        with listener._lock:
            listener.unsubscribe(client.keys.channel(stream.id), stream._mailbox)  # type: ignore[arg-type]
        wait_until(lambda: channels(redis_client, client.keys) == [])


async def test_an_iteration_left_early_ends_the_request_async(
    async_client: AsyncClient, redis_client: redis.Redis, worker: FakeWorker
) -> None:
    stream = async_client.stream("x")
    serving = asyncio.create_task(await_until(worker.step))
    async for text in stream:
        assert text == PIECES[0]
        break
    await serving
    await await_until(lambda: channels(redis_client, async_client.keys) == [])
    key = async_client.keys.record(stream.id)
    # The event loop closes the iterator in a task of its own.
    await await_until(lambda: redis_client.hget(key, "state") == "cancelled")


@pytest.mark.parametrize("cancel_on_exit", [True, False])
async def test_a_cancelled_task_stops_listening(
    async_client: AsyncClient, redis_client: redis.Redis, cancel_on_exit: bool
) -> None:
    stream = async_client.stream("x", cancel_on_exit=cancel_on_exit)

    async def read() -> None:
        async with stream:
            async for _ in stream:
                raise AssertionError("nobody serves it")

    task = asyncio.create_task(read())
    channel = async_client.keys.channel(stream.id)
    await await_until(lambda: channels(redis_client, async_client.keys) == [channel])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await await_until(lambda: channels(redis_client, async_client.keys) == [])
    state = redis_client.hget(async_client.keys.record(stream.id), "state")
    assert state == ("cancelled" if cancel_on_exit else "queued")


async def test_a_forgotten_stream_stops_listening_async(
    async_client: AsyncClient, redis_client: redis.Redis
) -> None:
    await async_client.submit("first")  # fakeredis keeps the traceback of its first NOSCRIPT error
    stream = async_client.stream("x")
    await stream.__aenter__()
    request_id = stream.id
    channel = async_client.keys.channel(request_id)
    await await_until(lambda: channels(redis_client, async_client.keys) == [channel])
    del stream
    gc.collect()
    await await_until(lambda: channels(redis_client, async_client.keys) == [])
    assert (await async_client.status(request_id)).state == "queued"


async def _first(stream: AsyncTokenStream) -> str:
    async with stream:
        return await anext(aiter(stream))


@pytest.mark.parametrize("times", [1, 2])
async def test_a_task_cancelled_while_it_opens_or_closes_leaves_nothing(
    async_client: AsyncClient, redis_client: redis.Redis, running_worker: FakeWorker, times: int
) -> None:
    """Also when it waits for its turn to speak to Redis, and is cancelled again meanwhile."""
    assert (await async_client.generate("x")).text == TEXT  # there is a connection
    listener = async_client._link._partitions.home_of("x").listener
    async with listener._sending:
        opening = asyncio.create_task(_first(async_client.stream("x")))
        await await_until(lambda: len(listener._subscribers.channels()) == 1)
        for _ in range(times):
            opening.cancel()
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await opening
    await await_until(lambda: listener._subscribers.channels() == [])
    await await_until(lambda: channels(redis_client, async_client.keys) == [])
