"""Reading the ready streams: consumer groups and entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from .keys import GROUP, Keyspace
from .replies import ReadyEntry

if TYPE_CHECKING:
    import redis
    import redis.asyncio


def create_groups(client: redis.Redis, keys: Keyspace) -> None:
    """Make the consumer group of every ready stream; those that exist stay as they are."""
    for stream in keys.ready_streams.values():
        for options in _GROUP_OPTIONS:
            try:
                client.xgroup_create(stream, GROUP, **options)
                break
            except ResponseError as error:
                if _exists(error, options):
                    break


async def acreate_groups(client: redis.asyncio.Redis, keys: Keyspace) -> None:
    """`create_groups` for asyncio."""
    for stream in keys.ready_streams.values():
        for options in _GROUP_OPTIONS:
            try:
                await client.xgroup_create(stream, GROUP, **options)
                break
            except ResponseError as error:
                if _exists(error, options):
                    break


#: From 0, not $: what was enqueued before the first worker came must be read. Redis 7 is told that
#: nothing was read yet, or it could not tell the group's lag while older entries are pending.
_FROM_THE_START: Final[dict[str, Any]] = {"id": "0", "mkstream": True}
_GROUP_OPTIONS: Final = ({**_FROM_THE_START, "entries_read": 0}, _FROM_THE_START)


def _exists(error: ResponseError, options: dict[str, Any]) -> bool:
    """Whether the group is there; False: try the next options. Re-raises anything else."""
    if "BUSYGROUP" in str(error):
        return True
    if "entries_read" not in options:
        raise error
    return False  # Redis 6.2 does not know ENTRIESREAD, and reports no lag


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
        traceparent=fields.get("traceparent", ""),
        tracestate=fields.get("tracestate", ""),
    )
