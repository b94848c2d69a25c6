"""Fixtures of the worker's tests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from support_redis import FakeBackend, ServerBackend
from support_worker_bench import Bench
from tokenmill.calls import QueueCalls
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """The root logger is put back after a test that set up a worker's logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def bench(fake: FakeBackend, keyspace: Keyspace) -> AsyncIterator[Bench]:
    client = fake.async_client()
    yield Bench(client, keyspace, QueueCalls(keyspace))
    await client.aclose()


@pytest.fixture
async def server_bench(server: EmbeddedServer, keyspace: Keyspace) -> AsyncIterator[Bench]:
    """The same on a real server: for blocking reads, which fakeredis cannot be got out of."""
    client = ServerBackend(server).async_client()
    yield Bench(client, keyspace, QueueCalls(keyspace))
    await client.aclose()
