"""Redis for tests: an emulation in this process and a real server, behind one face."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Protocol

import fakeredis
import redis
import redis.asyncio

from tokenmill._redis import aconnect, connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace


class RedisBackend(Protocol):
    """Clients of one server; whoever asks for a client closes it."""

    name: str

    def client(self) -> redis.Redis: ...

    def async_client(self) -> redis.asyncio.Redis: ...


@dataclass
class FakeBackend:
    """fakeredis with Lua: no process, no INFO, no memory limit."""

    name: str = "fakeredis"
    server: fakeredis.FakeServer = field(default_factory=fakeredis.FakeServer)

    def client(self) -> redis.Redis:
        return fakeredis.FakeRedis(server=self.server, decode_responses=True, protocol=2)

    def async_client(self) -> redis.asyncio.Redis:
        return fakeredis.FakeAsyncRedis(server=self.server, decode_responses=True, protocol=2)


@dataclass
class ServerBackend:
    """A real server, through the product's own way to connect."""

    server: EmbeddedServer
    name: str = "valkey"

    def client(self) -> redis.Redis:
        return connect(self.server.url)

    def async_client(self) -> redis.asyncio.Redis:
        return aconnect(self.server.url)


def unique_keyspace() -> Keyspace:
    """Keys that no other test uses, on a server shared by many."""
    return Keyspace(namespace=f"test-{secrets.token_hex(8)}")
