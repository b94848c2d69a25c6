"""Commands to the wire without redis-py's detours: packed by hiredis, and written at once.

redis-py's asyncio connections encode a command in Python, piece by piece, and start a task with a
timer for every write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.exceptions import DataError


def pack_in_c(client: Redis) -> Redis:
    """Let the client's connections encode commands with hiredis, and write without a task.

    A step writes four arguments for each running request: in Python, encoding them takes longer
    than all else that the publisher does. Call it before the first command.
    """
    pool = client.connection_pool
    usual: type[Any] = pool.connection_class
    pool.connection_class = type(f"Packing{usual.__name__}", (_Packing, usual), {})
    return client


class _Packing:
    """In front of one of redis-py's asyncio connection classes."""

    def pack_command(self, name: str | bytes, *args: Any) -> list[bytes]:
        # redis-py has names of two words, which Redis takes as two arguments.
        words = name.encode().split() if isinstance(name, str) else name.split()
        try:
            return [hiredis.pack_command((*words, *args))]
        except TypeError as error:
            raise DataError("an argument is neither text, bytes nor a number") from error

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """Redis takes what fits into the socket's buffer at once, and then there is nothing to
        wait for. What does not fit is redis-py's to wait for, with its time limit."""
        connection: Any = self
        usual: Any = super()
        writer = connection._writer
        if writer is None or not isinstance(command, list) or writer.transport.is_closing():
            await usual.send_packed_command(command, check_health)
            return
        if check_health:
            await connection.check_health()
            writer = connection._writer
        writer.writelines(command)
        if writer.transport.get_write_buffer_size():
            await usual.send_packed_command([], check_health=False)
