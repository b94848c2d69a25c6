"""Is this Redis fit for Tokenmill? Looked at once, when a worker starts or a doctor calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from redis.exceptions import NoPermissionError

if TYPE_CHECKING:
    import redis
    import redis.asyncio

MIN_VERSION: Final = (6, 2)


@dataclass(frozen=True, slots=True)
class Finding:
    """An `error` must keep a worker from starting; a `warning` is for the log."""

    severity: Literal["error", "warning"]
    code: Literal["version", "eviction", "persistence", "unknown"]
    message: str


def check_server(client: redis.Redis) -> list[Finding]:
    """What is wrong with the server; empty when nothing is. Raises what redis-py raises."""
    try:
        return findings(client.info())
    except NoPermissionError:
        return [_NOT_ALLOWED]


async def acheck_server(client: redis.asyncio.Redis) -> list[Finding]:
    """`check_server` for asyncio."""
    try:
        return findings(await client.info())
    except NoPermissionError:
        return [_NOT_ALLOWED]


_NOT_ALLOWED = Finding(
    "warning", "unknown", "the server was not checked: this user may not call INFO (+info)"
)


def findings(info: Mapping[str, Any]) -> list[Finding]:
    """The judgement on a reply to INFO."""
    found = []
    version = str(info.get("redis_version", ""))
    # Valkey reports the last Redis version it is compatible with.
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_VERSION:
        found.append(
            Finding("error", "version", f"Redis {version or '?'} is too old; use 6.2 or newer")
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            Finding(
                "error",
                "eviction",
                f"maxmemory-policy is {policy}: Redis would drop requests when memory is short; "
                "set it to noeviction",
            )
        )
    if not info.get("aof_enabled"):
        found.append(
            Finding(
                "warning",
                "persistence",
                "appendonly is off: a restart of Redis loses all requests",
            )
        )
    return found
