"""Commands packed by hiredis are byte for byte those of redis-py, and arrive as safely."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, DataError, TimeoutError

from tokenmill_worker.packing import pack_in_c

ONCE = Retry(NoBackoff(), 0)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "x"),
        ("CLIENT LIST",),
        ("EVALSHA", "a" * 40, 1, "tokenmill:{default.0}:own", "PUBLISH", "id", "1.17", "2", "é€😀"),
        ("SET", b"\xff\x00", 1.5, "", "x" * 10_000),
    ],
)
def test_the_bytes_are_the_same(command: tuple[str | bytes | int | float, ...]) -> None:
    usual = Redis().connection_pool.make_connection()
    in_c = pack_in_c(Redis()).connection_pool.make_connection()

    assert b"".join(in_c.pack_command(*command)) == b"".join(usual.pack_command(*command))


def test_what_cannot_be_sent_is_redis_pys_own_error() -> None:
    with pytest.raises(DataError):
        pack_in_c(Redis()).connection_pool.make_connection().pack_command("SET", "x", None)


@asynccontextmanager
async def connected_to(serve: Serve, **options: Any) -> AsyncIterator[Redis]:
    """A client of a server of this test's own."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        async with await asyncio.start_unix_server(serve, path):
            client = pack_in_c(
                Redis(unix_socket_path=path, protocol=2, driver_info=None, retry=ONCE, **options)
            )
            yield client
            await client.aclose()


async def ask_again(connection: Any) -> None:
    await connection.send_command("GET", "key")
    await connection.read_response()


async def test_what_the_socket_does_not_take_at_once_is_written_too() -> None:
    value = "x" * 5_000_000
    received = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)  # let the client fill the socket's buffer
        while value.encode() not in received:
            received.extend(await reader.read(1 << 20))
        writer.write(b"+OK\r\n")
        await reader.read()
        writer.close()

    async with connected_to(serve) as client:
        assert await client.set("key", value)
    assert received == hiredis.pack_command(("SET", "key", value))


async def test_a_server_that_does_not_read_is_given_up() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await given_up.wait()
        writer.close()

    given_up = asyncio.Event()
    async with connected_to(serve, socket_timeout=0.1) as client:
        with pytest.raises(TimeoutError):
            await client.set("key", "x" * 5_000_000)
        given_up.set()


async def test_a_connection_that_ended_is_noticed_and_replaced() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"key\r\n")
        writer.write(b"$5\r\nvalue\r\n")
        writer.close()

    async with connected_to(serve) as client:
        connection = await client.connection_pool.get_connection()
        await connection.send_command("GET", "key")
        assert await connection.read_response() == b"value"
        with pytest.raises(ConnectionError):
            await ask_again(connection)
        await client.connection_pool.release(connection)
        assert await client.get("key") == b"value"
