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
#: A master that lost its replicas (`min-replicas-to-write`) may have been replaced.
_REDIRECTED_WORDS = ("READONLY", "NOREPLICAS")
_ASK_ERRORS = (exceptions.RedisError, OSError)


def is_from_former_master(error: exceptions.ResponseError) -> bool:
    """Whether another server may be the right one. Redis 6.2 says so inside a script's error."""
    text = str(error)
    return isinstance(error, _REDIRECTED) or any(word in text for word in _REDIRECTED_WORDS)


class Asker(Protocol):
    """Sends one question to one server. Raises what redis-py raises."""

    def __call__(
        self, address: Address, question: tuple[str, ...], *, uses_tls: bool, **kwargs: Any
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The master, if the server that was asked knows one, and whom to ask next time.

    `epoch` grows with every change of the configuration, where the servers count them.
    """

    master: Address | None
    epoch: int = 0
    peers: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """What to ask, how to read the reply of a server, and what to report when nobody knows."""

    question: tuple[str, ...]
    read: Callable[[Any, Address], Answer]
    failure: str


@dataclass(slots=True, kw_only=True)
class Locator:
    """Asks the servers in random order until one knows the master, in a configuration not older
    than the latest seen. The order is random so that the next try need not hear the same
    out-of-date answer. May be shared by threads.

    All connections of a program to one partition share a locator: while an old and a new master
    are both alive, it must not write a bit here and a bit there. Each compares `master`, the latest
    answer, with the server it is connected to.
    """

    servers: tuple[Address, ...]
    search: Search
    uses_tls: bool
    connection: Mapping[str, Any]  # redis-py's options for the connection that asks
    verified: bool
    insecure: bool
    master: Address | None = field(default=None, init=False)
    _epoch: int = field(default=0, init=False)
    _known: tuple[Address, ...] = field(default=(), init=False)

    def locate(self, ask: Asker) -> Address:
        """Raises what redis-py raises, or `ConnectionError` if nobody knows the master."""
        inquiry = _Inquiry(self._epoch)
        for server in self._in_random_order():
            try:
                reply = ask(server, self.search.question, uses_tls=self.uses_tls, **self.connection)
            except _ASK_ERRORS as error:
                inquiry.failed(error)
            else:
                inquiry.answered(self.search.read(reply, server))
            if inquiry.is_over:
                break
        return self._learn(inquiry)

    async def alocate(self, ask: Callable[..., Awaitable[Any]]) -> Address:
        """`locate` for asyncio."""
        inquiry = _Inquiry(self._epoch)
        for server in self._in_random_order():
            try:
                reply = await ask(
                    server, self.search.question, uses_tls=self.uses_tls, **self.connection
                )
            except _ASK_ERRORS as error:
                inquiry.failed(error)
            else:
                inquiry.answered(self.search.read(reply, server))
            if inquiry.is_over:
                break
        return self._learn(inquiry)

    def _in_random_order(self) -> Iterator[Address]:
        servers = list(dict.fromkeys((*self.servers, *self._known)))
        random.shuffle(servers)
        return iter(servers)

    def _learn(self, inquiry: _Inquiry) -> Address:
        best = inquiry.best
        if best is None or best.master is None:
            raise inquiry.error or exceptions.ConnectionError(self.search.failure)
        self._require_safe_way(best.master)
        self._known = best.peers or self._known
        self._epoch = best.epoch
        self.master = best.master
        return best.master

    def _require_safe_way(self, master: Address) -> None:
        try:
            require_safe_way(master.host, verified=self.verified, insecure=self.insecure)
        except ConfigurationError as error:
            # Inside redis-py; `_redis_errors` finds the cause again.
            raise exceptions.ConnectionError("refused") from error


@dataclass(slots=True)
class _Inquiry:
    """The answers of one round. An older configuration counts only if nobody has a newer one."""

    epoch: int
    best: Answer | None = None
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.best is not None and self.best.epoch >= self.epoch

    def answered(self, answer: Answer) -> None:
        if answer.master is not None and (self.best is None or answer.epoch > self.best.epoch):
            self.best = answer

    def failed(self, error: Exception) -> None:
        # A Sentinel that does not watch this master says so by an error.
        if "No such master" not in str(error):
            self.error = error


def sentinel_search(service: str) -> Search:
    """The reply is [name, value, name, value…] about the master."""

    def read(reply: Any, server: Address) -> Answer:
        facts = dict(zip(reply[::2], reply[1::2], strict=True))
        master = Address(facts["ip"], int(facts["port"]))
        return Answer(master, epoch=int(facts["config-epoch"]))

    question = ("SENTINEL", "MASTER", service)
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
            peers=tuple(dict.fromkeys(_node_addresses(nodes, server))),
        )

    return Search(("CLUSTER", "SLOTS"), read, "no node knows the master of the slot")


def _node_addresses(nodes: Iterable[Any], server: Address) -> Iterator[Address]:
    """A node without a host is on that of the node that answers; `?` is a host not yet known."""
    for host, port, *_ in nodes:
        if host != "?":
            yield Address(host or server.host, int(port))
