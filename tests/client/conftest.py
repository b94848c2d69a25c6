"""Fixtures of the SDK's tests: a worker double and a client, on both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from support_redis import RedisBackend
from support_sdk import TEXT
from tokenmill import Client
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker


@pytest.fixture
def worker(redis_client: redis.Redis, keyspace: Keyspace) -> FakeWorker:
    """Answers everything with TEXT, when the test lets it `step()`."""
    return FakeWorker(redis_client, lambda _: TEXT, namespace=keyspace.namespace)


@pytest.fixture
def running_worker(worker: FakeWorker) -> Iterator[FakeWorker]:
    """The same at work in a thread of its own."""
    with worker:
        yield worker


@pytest.fixture
def make_client(redis_backend: RedisBackend, keyspace: Keyspace) -> Iterator[Callable[..., Client]]:
    """Clients of this test's namespace, each with connections of its own."""
    clients: list[Client] = []
    connections: list[redis.Redis] = []

    def make(**options: object) -> Client:
        connection = redis_backend.client()
        connections.append(connection)
        client = Client(redis=connection, namespace=keyspace.namespace, **options)  # type: ignore[arg-type]
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
    for connection in connections:
        connection.close()


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()
