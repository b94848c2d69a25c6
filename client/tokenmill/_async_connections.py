"""The asyncio twins of the connections that look up the master each time they connect."""

from __future__ import annotations

from typing import Any

import redis.asyncio.connection
from redis import exceptions

from ._locator import FORMER_MASTER, Locator, is_from_former_master
from ._url import Address


class MasterConnection(redis.asyncio.connection.Connection):
    """See `_connections.MasterConnection`."""

    def __init__(self, *, locator: Locator | None = None, **kwargs: Any) -> None:
        self._locator = locator
        super().__init__(**kwargs)

    async def _connect(self) -> None:
        if self._locator is not None:
            self.host, self.port = await self._locator.alocate(_ask)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def can_read(self) -> bool:
        """redis-py asks this before it uses an idle connection, and renews one that fails."""
        locator = self._locator
        if locator is not None and locator.master != (self.host, self.port):
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(FORMER_MASTER)
        return bool(await super().can_read())

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except exceptions.ResponseError as error:
            if not is_from_former_master(error):
                raise
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(FORMER_MASTER) from error


class MasterSSLConnection(MasterConnection, redis.asyncio.connection.SSLConnection):
    """The same over TLS."""


async def _ask(
    address: Address, question: tuple[str, ...], *, uses_tls: bool, **kwargs: Any
) -> Any:
    """The reply of one server, over a connection of its own."""
    module = redis.asyncio.connection
    kind = module.SSLConnection if uses_tls else module.Connection
    connection: Any = kind(host=address.host, port=address.port, **kwargs)
    try:
        await connection.connect()
        await connection.send_command(*question)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)
