"""More streams at once than redis-py has connections."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import redis

from support_sdk import TEXT
from tokenmill import AsyncClient, Client
from tokenmill._base import CALLS_AT_A_TIME
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker

STREAMS = 300


def make_worker(client: redis.Redis, keyspace: Keyspace) -> FakeWorker:
    return FakeWorker(client, lambda _: TEXT, namespace=keyspace.namespace)


def test_threads_take_turns(server: EmbeddedServer, keyspace: Keyspace) -> None:
    with (
        connect(server.url) as redis_client,
        make_worker(redis_client, keyspace),
        Client(server.url, namespace=keyspace.namespace) as client,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        answers = list(threads.map(lambda _: client.generate("hello").text, range(STREAMS)))

        assert answers == [TEXT] * STREAMS
        assert connections_of_clients(redis_client) <= CALLS_AT_A_TIME + 1  # and the listener's


async def test_tasks_take_turns(server: EmbeddedServer, keyspace: Keyspace) -> None:
    with connect(server.url) as redis_client, make_worker(redis_client, keyspace):
        async with AsyncClient(server.url, namespace=keyspace.namespace) as client:
            answers = await asyncio.gather(*(client.generate("hello") for _ in range(STREAMS)))

            assert [answer.text for answer in answers] == [TEXT] * STREAMS
            assert connections_of_clients(redis_client) <= CALLS_AT_A_TIME + 1


def connections_of_clients(client: redis.Redis) -> int:
    return sum(one["name"] == "tokenmill-client" for one in client.client_list())
