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

#: The hot scripts do without the prelude: its functions would be made anew for every token.
_WITHOUT_PRELUDE = frozenset({"append", "heartbeat"})
SCRIPT_NAMES = (
    "enqueue", "admit", "lease", "append", "heartbeat", "finish", "release", "cancel", "tick",
)  # fmt: skip


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
    source = (folder / f"{name}.lua").read_text(encoding="utf-8")
    if name not in _WITHOUT_PRELUDE:
        source = (folder / "common.lua").read_text(encoding="utf-8") + "\n" + source
    return Script(name, source)


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
