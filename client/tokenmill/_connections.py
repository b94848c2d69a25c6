"""redis-py connections that look up the master each time they connect, and leave it when it is one
no longer."""

from __future__ import annotations

from typing import Any

import redis.connection
from redis import exceptions

from ._locator import FORMER_MASTER, Locator, is_from_former_master
from ._url import Address


class MasterConnection(redis.connection.Connection):
    """Closes itself when the server answers that it is not the master, so that the next call
    connects anew: to another server, if the name or the `locator` leads there by then."""

    def __init__(self, *, locator: Locator | None = None, **kwargs: Any) -> None:
        self._locator = locator
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        if self._locator is not None:
            self.host, self.port = self._locator.locate(_ask)
        return super()._connect()  # type: ignore[no-untyped-call]

    def can_read(self, timeout: float = 0) -> bool:
        """redis-py asks this before it uses an idle connection, and renews one that fails."""
        locator = self._locator
        if locator is not None and locator.master != (self.host, self.port):
            self.disconnect()  # type: ignore[no-untyped-call]
            raise exceptions.ConnectionError(FORMER_MASTER)
        return bool(super().can_read(timeout))

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        except exceptions.ResponseError as error:
            if not is_from_former_master(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise exceptions.ConnectionError(FORMER_MASTER) from error


class MasterSSLConnection(MasterConnection, redis.connection.SSLConnection):
    """The same over TLS."""


def _ask(address: Address, question: tuple[str, ...], *, uses_tls: bool, **kwargs: Any) -> Any:
    """The reply of one server, over a connection of its own."""
    kind = redis.connection.SSLConnection if uses_tls else redis.connection.Connection
    connection: Any = kind(host=address.host, port=address.port, **kwargs)
    try:
        connection.connect()
        connection.send_command(*question)
        return connection.read_response()
    finally:
        connection.disconnect()
