"""What holds for a whole pool: into how many partitions it is divided. The first worker decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .errors import ConfigurationError
from .keys import PARTITIONS_FIELD, PROTOCOL_FIELD, Keyspace

if TYPE_CHECKING:
    import redis.asyncio

PROTOCOL: Final = "1"


async def asettle_partitions(
    meta: redis.asyncio.Redis, first: redis.asyncio.Redis, keys: Keyspace, wanted: int | None
) -> int:
    """How many partitions the pool has; writes `wanted` (1 if None) where nobody has said so yet.

    `meta` reaches the pool's own hash, `first` partition 0. Raises what redis-py raises, and:

    Raises:
        ConfigurationError: the pool has another number of partitions, or requests in its only one.
    """
    stored: Any = await meta.hget(keys.meta, PARTITIONS_FIELD)
    if stored is None and (wanted or 1) > 1 and await _is_in_use(first, keys):
        raise ConfigurationError(
            f"partitions: pool {keys.pool} has requests in a single partition; let them end first, "
            "or use a new pool"
        )
    await akeep_partitions(meta, keys, wanted or 1)
    stored = await meta.hget(keys.meta, PARTITIONS_FIELD)
    count = int(stored)
    if wanted not in {None, count}:
        raise ConfigurationError(
            f"partitions: pool {keys.pool} has {count}, which clients compute with; leave the "
            "option out, or use a new pool (or delete the key "
            f"{keys.meta} while the pool is empty and nobody is connected)"
        )
    return count


async def akeep_partitions(meta: redis.asyncio.Redis, keys: Keyspace, count: int) -> None:
    """Write it again if it is gone; never changes what is there."""
    await meta.hsetnx(keys.meta, PARTITIONS_FIELD, str(count))
    await meta.hsetnx(keys.meta, PROTOCOL_FIELD, PROTOCOL)


async def _is_in_use(first: redis.asyncio.Redis, keys: Keyspace) -> bool:
    counts: Any = await first.hmget(keys.partitions(1)[0].counters, ["queued", "leased"])
    return any(int(count or 0) for count in counts)
