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
#: Sharded Pub/Sub.
MIN_CLUSTER_VERSION: Final = (7, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """An `error` must keep a worker from starting; a `warning` is for the log."""

    severity: Literal["error", "warning"]
    code: Literal["version", "topology", "eviction", "persistence", "unknown"]
    message: str


def check_server(client: redis.Redis, *, is_cluster: bool = False) -> list[Finding]:
    """What is wrong with the server; empty when nothing is. Raises what redis-py raises.

    `is_cluster`: whether the URL is that of a cluster.
    """
    try:
        return findings(client.info(), is_cluster=is_cluster)
    except NoPermissionError:
        return [_NOT_ALLOWED]


async def acheck_server(client: redis.asyncio.Redis, *, is_cluster: bool = False) -> list[Finding]:
    """`check_server` for asyncio."""
    try:
        return findings(await client.info(), is_cluster=is_cluster)
    except NoPermissionError:
        return [_NOT_ALLOWED]


_NOT_ALLOWED = Finding(
    "warning", "unknown", "the server was not checked: this user may not call INFO (+info)"
)


def findings(info: Mapping[str, Any], *, is_cluster: bool = False) -> list[Finding]:
    """The judgement on a reply to INFO."""
    found = []
    version = str(info.get("redis_version", ""))
    # Valkey reports the last Redis version it is compatible with.
    oldest = MIN_CLUSTER_VERSION if is_cluster else MIN_VERSION
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
        what = " for a cluster" if is_cluster else ""
        use = ".".join(map(str, oldest))
        found.append(
            Finding(
                "error", "version", f"Redis {version or '?'} is too old{what}; use {use} or newer"
            )
        )
    if bool(info.get("cluster_enabled")) is not is_cluster:
        way_out = (
            "is not part of a cluster; use redis://"
            if is_cluster
            else "is part of a cluster; use redis+cluster://"
        )
        found.append(Finding("error", "topology", f"the server {way_out}"))
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
                "appendonly is off: a restart of Redis loses all requests; set appendonly to yes",
            )
        )
    return found
