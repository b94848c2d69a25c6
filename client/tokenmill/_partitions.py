"""The partitions of a pool, and which of them a request lives in. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from .calls import QueueCalls, QueuePolicy
from .errors import ProtocolError
from .keys import MAX_PARTITIONS, Keyspace, partition_of

ClientT = TypeVar("ClientT")
ListenerT = TypeVar("ListenerT")


@dataclass(frozen=True, slots=True)
class Partition(Generic[ClientT, ListenerT]):
    """One partition, and the way to the server that holds it."""

    keys: Keyspace
    calls: QueueCalls
    redis: ClientT
    listener: ListenerT


class Partitions(Generic[ClientT, ListenerT]):
    """Makes clients and listeners as they are needed: one of each for a single server, one for each
    slot in a cluster, where messages are sharded as well. Thread-safe.

    `connect` gets a slot; `listen` a client, the channel to hold on to, and whether messages are
    sharded.
    """

    def __init__(
        self,
        keys: Keyspace,
        policy: QueuePolicy,
        *,
        is_cluster: bool,
        connect: Callable[[int], ClientT],
        listen: Callable[[ClientT, str, bool], ListenerT],
    ) -> None:
        self._keys = keys
        self._policy = replace(policy, publish="SPUBLISH") if is_cluster else policy
        self._is_cluster = is_cluster
        self._connect = connect
        self._listen = listen
        self._lock = threading.RLock()
        self._clients: dict[int, ClientT] = {}
        self._listeners: dict[int, ListenerT] = {}
        self._partitions: dict[int, Partition[ClientT, ListenerT]] = {}
        self._count: int | None = None

    @property
    def is_counted(self) -> bool:
        """Whether it is known how many there are; until then there is one."""
        return self._count is not None

    def learn(self, stored: str | None) -> None:
        """What stands in the pool's hash; None before the first worker came, who decides it."""
        if stored is None:
            return
        count = int(stored) if stored.isdecimal() else 0
        if not 1 <= count <= MAX_PARTITIONS:
            raise ProtocolError(f"pool {self._keys.pool}: its number of partitions makes no sense")
        self._count = count

    def home_of(self, request_id: str) -> Partition[ClientT, ListenerT]:
        return self._partition(partition_of(request_id, self._count or 1))

    def all(self) -> list[Partition[ClientT, ListenerT]]:
        return [self._partition(number) for number in range(self._count or 1)]

    def client_of(self, slot: int) -> ClientT:
        """The client for the keys of a slot."""
        slot = slot if self._is_cluster else 0
        with self._lock:
            if slot not in self._clients:
                self._clients[slot] = self._connect(slot)
            return self._clients[slot]

    def clients(self) -> list[ClientT]:
        return list(self._clients.values())

    def listeners(self) -> list[ListenerT]:
        return list(self._listeners.values())

    def forget_listeners(self) -> None:
        """After a fork: threads, and whoever held the lock, stay behind."""
        self._lock = threading.RLock()
        self._listeners.clear()
        self._partitions.clear()

    def _partition(self, number: int) -> Partition[ClientT, ListenerT]:
        partition = self._partitions.get(number)
        if partition is not None:
            return partition
        with self._lock:
            keys = replace(self._keys, partition=number)
            calls = QueueCalls(keys, self._policy)
            client = self.client_of(keys.slot)
            partition = Partition(keys, calls, client, self._listener_of(keys, client))
            return self._partitions.setdefault(number, partition)

    def _listener_of(self, keys: Keyspace, client: ClientT) -> ListenerT:
        slot = keys.slot if self._is_cluster else 0
        if slot not in self._listeners:
            sharded = self._policy.publish == "SPUBLISH"
            self._listeners[slot] = self._listen(client, keys.channel(""), sharded)
        return self._listeners[slot]
