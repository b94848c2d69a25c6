"""Reading the ready streams: consumer groups and entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from .keys import GROUP, Keyspace
from .replies import ReadyEntry

if TYPE_CHECKING:
    import redis
    import redis.asyncio


def create_groups(client: redis.Redis, keys: Keyspace) -> None:
    """Make the consumer group of every ready stream; those that exist stay as they are."""
    for stream in keys.ready_streams.values():
        try:
            # From 0, not $: what was enqueued before the first worker came must be read.
            client.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            _unless_exists(error)


async def acreate_groups(client: redis.asyncio.Redis, keys: Keyspace) -> None:
    """`create_groups` for asyncio."""
    for stream in keys.ready_streams.values():
        try:
            await client.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            _unless_exists(error)


def _unless_exists(error: ResponseError) -> None:
    if "BUSYGROUP" not in str(error):
        raise error


def read_entries(keys: Keyspace, reply: Any) -> list[ReadyEntry]:
    """The entries in a reply to XREADGROUP on ready streams (RESP2 shape; None: nothing)."""
    classes = {stream: ready_class for ready_class, stream in keys.ready_streams.items()}
    return [
        _entry(classes[stream], entry_id, fields or {})  # None: deleted since it was delivered
        for stream, entries in reply or ()
        for entry_id, fields in entries
    ]


def _entry(ready_class: str, entry_id: str, fields: dict[str, str]) -> ReadyEntry:
    return ReadyEntry(
        ready_class,
        entry_id,
        fields.get("id", ""),
        body=fields.get("body"),
        tenant=fields.get("tenant", ""),
    )
