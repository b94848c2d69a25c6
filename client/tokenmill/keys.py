"""Every name Tokenmill uses in Redis. No other module joins a key."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace

from redis.crc import key_slot

from .errors import ConfigurationError

#: Consumer group of the workers on every ready stream.
GROUP = "tokenmill"
#: Ready streams in the order in which workers look at them: r = resumed work, then the priorities.
READY_CLASSES = ("r", "0", "1", "2")
#: The public names of the priority classes and their stream.
PRIORITIES = {"high": "0", "normal": "1", "low": "2"}
#: In the hash of counters, the queued requests of a tenant stand under this and its name.
TENANT_COUNTER_PREFIX = "t:"

#: Fields of the pool's own hash, `Keyspace.meta`.
PARTITIONS_FIELD = "partitions"
PROTOCOL_FIELD = "protocol"
MAX_PARTITIONS = 1024

_NAME = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")


def partition_of(request_id: str, partitions: int) -> int:
    """Which of a pool's partitions a request lives in; the same for every client, for ever."""
    return zlib.crc32(request_id.encode()) % partitions


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The keys of one partition of a pool of interchangeable workers (same model, same tokenizer).

    The braces put all keys of a partition into one cluster slot: a script may touch them together.
    How many partitions there are stands in the hash `tokenmill:{default}:meta`; one without.
    With P = `tokenmill:{default.0}:`

    | key                  | type    | content                             | lifetime             |
    | -------------------- | ------- | ----------------------------------- | -------------------- |
    | P q:r q:0 q:1 q:2    | stream  | ready entries `{id}`; r = resumed   | until acknowledged   |
    | P r:<id>             | hash    | the request's record                | deadline + retention |
    | P t:<id>             | stream  | event log: id `e-0`, field `d`      | retention            |
    | P h:<id>             | list    | history: what happened to it, JSON  | as the record        |
    | P c:<id>             | channel | the same events, as they happen     |                      |
    | P own                | hash    | id → fence of its lease             | until the lease ends |
    | P z:dl  P z:delay    | zset    | id → deadline, due time (ms)        | until end, promotion |
    | P b:<class>:<tenant> | list    | ids waiting for the tenant's window | empties itself       |
    | P win                | hash    | `<class>:<tenant>` → ready entries  | field removed at 0   |
    | P weights            | hash    | tenant → 2 to 100 windows           | until set to 1       |
    | P cnt                | hash    | in all, tokens, `t:`/`l:<tenant>`   | static               |
    | P mt                 | hash    | bookkeeping of tick                 | static               |
    | P dlq                | stream  | dead letters                        | trimmed              |
    | P full               | string  | memory pressure                     | seconds              |
    | P pause              | hash    | `since` when nothing new is leased  | until resumed        |
    | P w:<worker>         | string  | a worker's card, JSON               | three leases         |
    """

    namespace: str = "tokenmill"
    pool: str = "default"
    partition: int = 0

    def __post_init__(self) -> None:
        for name in ("namespace", "pool"):
            if not _NAME.match(getattr(self, name)):
                raise ConfigurationError(f"{name}: use 1 to 64 letters, digits, '_', '.' or '-'")

    @property
    def prefix(self) -> str:
        return f"{self.namespace}:{{{self.pool}.{self.partition}}}:"

    @property
    def meta(self) -> str:
        """What holds for the whole pool; in a slot of its own."""
        return f"{self.namespace}:{{{self.pool}}}:meta"

    @property
    def slot(self) -> int:
        """The cluster slot of all keys of this partition."""
        return key_slot(self.prefix.encode())

    @property
    def meta_slot(self) -> int:
        return key_slot(self.meta.encode())

    def partitions(self, count: int) -> tuple[Keyspace, ...]:
        """The keys of each partition of this pool."""
        return tuple(replace(self, partition=number) for number in range(count))

    def ready(self, ready_class: str) -> str:
        return f"{self.prefix}q:{ready_class}"

    @property
    def ready_streams(self) -> dict[str, str]:
        """Ready class → stream, in the order of service."""
        return {ready_class: self.ready(ready_class) for ready_class in READY_CLASSES}

    def record(self, request_id: str) -> str:
        return f"{self.prefix}r:{request_id}"

    def log(self, request_id: str) -> str:
        return f"{self.prefix}t:{request_id}"

    def history(self, request_id: str) -> str:
        return f"{self.prefix}h:{request_id}"

    def channel(self, request_id: str) -> str:
        return f"{self.prefix}c:{request_id}"

    def request_of_channel(self, channel: str) -> str:
        """The inverse of `channel`."""
        return channel.removeprefix(f"{self.prefix}c:")

    @property
    def owners(self) -> str:
        return f"{self.prefix}own"

    @property
    def deadlines(self) -> str:
        return f"{self.prefix}z:dl"

    @property
    def delayed(self) -> str:
        return f"{self.prefix}z:delay"

    @property
    def counters(self) -> str:
        return f"{self.prefix}cnt"

    @property
    def windows(self) -> str:
        return f"{self.prefix}win"

    @property
    def weights(self) -> str:
        return f"{self.prefix}weights"

    @property
    def maintenance(self) -> str:
        return f"{self.prefix}mt"

    @property
    def dead_letters(self) -> str:
        return f"{self.prefix}dlq"

    @property
    def memory_flag(self) -> str:
        return f"{self.prefix}full"

    @property
    def pause(self) -> str:
        return f"{self.prefix}pause"

    def backlog(self, ready_class: str, tenant: str) -> str:
        return f"{self.prefix}b:{ready_class}:{tenant}"

    def worker_card(self, worker_id: str) -> str:
        return f"{self.prefix}w:{worker_id}"

    @property
    def worker_cards(self) -> str:
        """Pattern of all worker cards, for SCAN."""
        return f"{self.prefix}w:*"
