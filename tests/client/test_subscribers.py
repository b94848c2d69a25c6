"""The connection of a listener dies while somebody writes to it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tokenmill._redis import RedisOptions, aconnect, connect
from tokenmill._subscribers import open_pubsub
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace

TRIES = 100


def cut(server: EmbeddedServer, name: str) -> None:
    """Kill the connections of this name."""
    with connect(server.url) as client:
        for one in client.client_list():
            if one["name"] == name:
                client.client_kill_filter(_id=one["id"])


async def write_often(pubsub: Any, channel: str) -> None:
    """What is written first goes into the buffer of a socket that nobody reads."""
    for _ in range(TRIES):
        await pubsub.subscribe(channel)
        await asyncio.sleep(0.01)


async def test_a_task_that_writes_does_not_reconnect(
    server: EmbeddedServer, keyspace: Keyspace
) -> None:
    """The reader would find itself beside a second reader of the new connection."""
    client = aconnect(server.url, RedisOptions(client_name=keyspace.namespace))
    pubsub: Any = open_pubsub(client, sharded=False)
    await pubsub.subscribe(keyspace.channel("a"))
    cut(server, keyspace.namespace)

    with pytest.raises(RedisConnectionError):
        await write_often(pubsub, keyspace.channel("b"))

    assert not pubsub.connection.is_connected
    await pubsub.aclose()
    await client.aclose()


def write_often_in_a_thread(pubsub: Any, channel: str) -> None:
    for _ in range(TRIES):
        pubsub.subscribe(channel)
        time.sleep(0.01)


def test_a_thread_that_writes_does_not_reconnect(
    server: EmbeddedServer, keyspace: Keyspace
) -> None:
    with connect(server.url, RedisOptions(client_name=keyspace.namespace)) as client:
        pubsub: Any = open_pubsub(client, sharded=False)
        pubsub.subscribe(keyspace.channel("a"))
        cut(server, keyspace.namespace)

        with pytest.raises(RedisConnectionError):
            write_often_in_a_thread(pubsub, keyspace.channel("b"))

        assert not pubsub.connection.is_connected
        pubsub.close()
