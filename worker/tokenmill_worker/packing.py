"""Commands to bytes by hiredis: redis-py's asyncio connections do it in Python, piece by piece."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.connection import HiredisRespSerializer

_SERIALIZER = HiredisRespSerializer()


def pack_in_c(client: Redis) -> Redis:
    """Let the client's connections encode commands with hiredis.

    A step writes four arguments for each running request: in Python, encoding them takes longer
    than all else that the publisher does. Call it before the first command.
    """
    pool = client.connection_pool
    pool.connection_class = _packing(pool.connection_class)
    return client


def _packing(connection_class: type[Any]) -> type[Any]:
    def pack_command(self: object, *args: Any) -> list[bytes]:
        packed: list[bytes] = _SERIALIZER.pack(*args)
        return packed

    name = f"Packing{connection_class.__name__}"
    return type(name, (connection_class,), {"pack_command": pack_command})
