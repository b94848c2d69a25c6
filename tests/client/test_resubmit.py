"""`resubmit`: what Redis lost altogether is enqueued again, under its id, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from support_sdk import IDS, PIECES, TEXT
from support_waiting import await_until, wait_until
from tokenmill import AsyncClient, Client
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.testing import FakeWorker


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def connection(own_server: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(own_server.url) as client:
        yield client


def lose_everything(connection: redis.Redis, worker: FakeWorker) -> FakeWorker:
    """Redis is empty and every connection cut; the worker of afterwards."""
    connection.flushall()
    worker.vanish()
    connection.client_kill_filter(_type="pubsub")
    return FakeWorker(connection, lambda _: TEXT)


async def test_a_stream_goes_on_async(own_server: EmbeddedServer, connection: redis.Redis) -> None:
    worker = FakeWorker(connection, lambda _: TEXT)
    async with AsyncClient(own_server.url, resubmit=True) as client, client.stream("x") as stream:
        texts = aiter(stream)
        await await_until(worker.step)
        received = [await anext(texts)]
        with lose_everything(connection, worker):
            received += [text async for text in texts]
        assert received == PIECES


def test_map_goes_on(own_server: EmbeddedServer, connection: redis.Redis) -> None:
    worker = FakeWorker(connection, lambda _: TEXT)
    with Client(own_server.url, resubmit=True) as client, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(list, client.map(["a", "b", "c"], concurrency=3))
        wait_until(lambda: worker.step() and len(worker.running) == 3)
        with lose_everything(connection, worker):
            assert [answer.token_ids for answer in answers.result()] == [IDS] * 3


async def test_map_goes_on_async(own_server: EmbeddedServer, connection: redis.Redis) -> None:
    worker = FakeWorker(connection, lambda _: TEXT)
    async with AsyncClient(own_server.url, resubmit=True) as client:

        async def collect() -> list[list[int]]:
            return [answer.token_ids async for answer in client.map("abc", concurrency=3)]

        answers = asyncio.create_task(collect())
        await await_until(lambda: worker.step() and len(worker.running) == 3)
        with lose_everything(connection, worker):
            assert await answers == [IDS] * 3
