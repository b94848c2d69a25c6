"""Commands packed by hiredis are byte for byte those of redis-py."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from redis.exceptions import DataError

from tokenmill_worker.packing import pack_in_c


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
