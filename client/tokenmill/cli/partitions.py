"""The partitions of a pool for commands that speak to Redis themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill import Client
from tokenmill._link import Home
from tokenmill._redis import redis_url
from tokenmill._redis_errors import translated
from tokenmill.operator_calls import OperatorCalls

from .connection import Connection


@contextmanager
def partitions(connection: Connection) -> Iterator[list[Home]]:
    """Every partition of the pool, with the way to it. Redis' errors become the SDK's."""
    with connection.client() as client, translated(redis_url(connection.redis_url)):
        yield client._link.partitions()


@contextmanager
def home(connection: Connection, request_id: str) -> Iterator[tuple[Client, Home]]:
    """A client, and the partition that the request lives in."""
    with connection.client() as client, translated(redis_url(connection.redis_url)):
        yield client, client._link.home(request_id)


def operator_calls(where: Home) -> OperatorCalls:
    """The operator's calls on one partition."""
    return OperatorCalls(where.keys, where.calls.policy)


def text(reply: Any) -> Any:
    """redis-py types every reply as text or bytes; our clients decode, so it is text."""
    return reply
