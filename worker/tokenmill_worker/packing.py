"""Commands to bytes by hiredis: redis-py's asyncio connections do it in Python, piece by piece."""

from __future__ import annotations

from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.exceptions import DataError


def pack_in_c(client: Redis) -> Redis:
    """Let the client's connections encode commands with hiredis.

    A step writes four arguments for each running request: in Python, encoding them takes longer
    than all else that the publisher does. Call it before the first command.
    """
    pool = client.connection_pool
    pool.connection_class = _packing(pool.connection_class)
    return client


def _packing(connection_class: type[Any]) -> type[Any]:
    def pack_command(self: object, name: str | bytes, *args: Any) -> list[bytes]:
        # redis-py has names of two words, which Redis takes as two arguments.
        words = name.encode().split() if isinstance(name, str) else name.split()
        try:
            return [hiredis.pack_command((*words, *args))]
        except TypeError as error:
            raise DataError("an argument is neither text, bytes nor a number") from error

    name = f"Packing{connection_class.__name__}"
    return type(name, (connection_class,), {"pack_command": pack_command})
