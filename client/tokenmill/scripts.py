"""The Lua scripts of the queue and the one way to run them, sync or async.

A `ScriptCall` is plain data: which script, its key, its arguments and how to read the reply. It
may be sent again after a lost reply, because every script is idempotent. `calls.py` builds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from redis.exceptions import NoScriptError

if TYPE_CHECKING:
    import redis
    import redis.asyncio

Reply = TypeVar("Reply")
Argument = str | bytes | int

SCRIPT_NAMES = (
    "enqueue", "admit", "peek", "lease", "append", "heartbeat", "finish", "release", "cancel",
    "tick", "requeue_dead", "purge", "set_weight", "tenants", "probe",
    "set_pause", "cancel_waiting", "move",
)  # fmt: skip
#: The files that are put in front of a script.
_PRELUDE = ("common", "window", "lifecycle")
#: The hot scripts do without: the prelude's functions would be made anew for every token.
_PRELUDES = {
    "append": (), "heartbeat": (), "peek": ("common",), "probe": ("common",),
    "tick": (*_PRELUDE, "tick_leases"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its full text and the SHA-1 under which Redis knows it."""

    name: str
    source: str
    sha1: str = field(init=False)

    def __post_init__(self) -> None:
        # SHA-1 is the protocol's name for a script, not a protection.
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha1", digest)


@cache
def load_script(name: str) -> Script:
    """The packaged script `name`, with the shared prelude where it uses it."""
    folder = resources.files(__package__) / "lua"
    parts = (*_PRELUDES.get(name, _PRELUDE), name)
    return Script(name, "\n".join((folder / f"{p}.lua").read_text(encoding="utf-8") for p in parts))


@dataclass(frozen=True, slots=True)
class ScriptCall(Generic[Reply]):
    """A call ready to be sent. `key` routes it in a cluster; the scripts derive the others."""

    script: Script
    key: str
    args: tuple[Argument, ...]
    parse: Callable[[Any], Reply]


def run(client: redis.Redis, call: ScriptCall[Reply]) -> Reply:
    """Send one call; raises what redis-py raises."""
    script = call.script
    try:
        reply: Any = client.evalsha(script.sha1, 1, call.key, *call.args)
    except NoScriptError:
        # Redis was restarted or failed over, or this is the first call: EVAL also caches.
        reply = client.eval(script.source, 1, call.key, *call.args)
    return call.parse(reply)


async def arun(client: redis.asyncio.Redis, call: ScriptCall[Reply]) -> Reply:
    """`run` for asyncio."""
    script = call.script
    try:
        reply: Any = await client.evalsha(script.sha1, 1, call.key, *call.args)
    except NoScriptError:
        reply = await client.eval(script.source, 1, call.key, *call.args)
    return call.parse(reply)
