"""Finding the master: by asking Sentinels for theirs, or cluster nodes who holds a slot."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from redis import exceptions

from ._url import Address, require_safe_way
from .errors import ConfigurationError

#: What a connection reports instead of the answer it got, so that the call is made again.
FORMER_MASTER: Final = "the server is not the master (any more)"
_REDIRECTED = (
    exceptions.ReadOnlyError,
    exceptions.MovedError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
)
_ASK_ERRORS = (exceptions.RedisError, OSError)


def is_from_former_master(error: exceptions.ResponseError) -> bool:
    """Whether another server may be the right one. Redis 6.2 says so inside a script's error."""
    return isinstance(error, _REDIRECTED) or "READONLY" in str(error)


class Asker(Protocol):
    """Sends one question to one server. Raises what redis-py raises."""

    def __call__(
        self, address: Address, question: tuple[str, ...], *, uses_tls: bool, **kwargs: Any
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The master, if the server that was asked knows one, and whom to ask next time."""

    master: Address | None
    peers: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """What to ask, how to read the reply of a server, and what to report when nobody knows."""

    question: tuple[str, ...]
    read: Callable[[Any, Address], Answer]
    failure: str


@dataclass(slots=True, kw_only=True)
class Locator:
    """Asks the servers in random order until one knows the master.

    Nothing is remembered but whom to ask: an answer may be out of date a moment later, and the
    order is random so that the next try need not hear the same out-of-date answer. May be shared
    by threads.
    """

    servers: tuple[Address, ...]
    search: Search
    uses_tls: bool
    connection: Mapping[str, Any]  # redis-py's options for the connection that asks
    verified: bool
    insecure: bool
    _known: tuple[Address, ...] = field(default=(), init=False)

    def locate(self, ask: Asker) -> Address:
        """Raises what redis-py raises, or `ConnectionError` if nobody knows the master."""
        last: Exception | None = None
        question = self.search.question
        for server in self._in_random_order():
            try:
                reply = ask(server, question, uses_tls=self.uses_tls, **self.connection)
            except _ASK_ERRORS as error:
                last = error
                continue
            master = self._learn(reply, server)
            if master is not None:
                return master
        raise last or exceptions.ConnectionError(self.search.failure)

    async def alocate(self, ask: Callable[..., Awaitable[Any]]) -> Address:
        """`locate` for asyncio."""
        last: Exception | None = None
        question = self.search.question
        for server in self._in_random_order():
            try:
                reply = await ask(server, question, uses_tls=self.uses_tls, **self.connection)
            except _ASK_ERRORS as error:
                last = error
                continue
            master = self._learn(reply, server)
            if master is not None:
                return master
        raise last or exceptions.ConnectionError(self.search.failure)

    def _in_random_order(self) -> Iterator[Address]:
        servers = list(dict.fromkeys((*self.servers, *self._known)))
        random.shuffle(servers)
        return iter(servers)

    def _learn(self, reply: Any, server: Address) -> Address | None:
        answer = self.search.read(reply, server)
        if answer.peers:
            self._known = answer.peers
        if answer.master is not None:
            self._require_safe_way(answer.master)
        return answer.master

    def _require_safe_way(self, master: Address) -> None:
        try:
            require_safe_way(master.host, verified=self.verified, insecure=self.insecure)
        except ConfigurationError as error:
            # Inside redis-py; `_redis_errors` finds the cause again.
            raise exceptions.ConnectionError("refused") from error


def sentinel_search(service: str) -> Search:
    """The reply is [host, port], or nothing if this Sentinel watches no such master."""

    def read(reply: Any, server: Address) -> Answer:
        return Answer(Address(reply[0], int(reply[1])) if reply else None)

    question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
    return Search(question, read, "no Sentinel knows a master of this name")


def cluster_search(slot: int) -> Search:
    """The reply is [[first slot, last slot, master, replica…]…], a node [host, port, id, …].

    CLUSTER SHARDS, its successor, is not known to Redis 6.2.
    """

    def read(reply: Any, server: Address) -> Answer:
        masters = [row[2] for row in reply if row[0] <= slot <= row[1]]
        nodes = (node for row in reply for node in row[2:])
        return Answer(
            next(_node_addresses(masters, server), None),
            tuple(dict.fromkeys(_node_addresses(nodes, server))),
        )

    return Search(("CLUSTER", "SLOTS"), read, "no node knows the master of the slot")


def _node_addresses(nodes: Iterable[Any], server: Address) -> Iterator[Address]:
    """A node without a host is on that of the node that answers; `?` is a host not yet known."""
    for host, port, *_ in nodes:
        if host != "?":
            yield Address(host or server.host, int(port))
