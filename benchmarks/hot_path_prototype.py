"""The prototype's hot path, for figures beside ours: `--prototype DIR` of `hot_path`.

`DIR` holds the prototype's `append.lua` and `common.py` (which runs scripts through redis-py).
What its worker did around them is done here: ready-made events into one flat list, one call per
step, and every code of the reply booked.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenmill._redis import aconnect, connect
from tokenmill.calls import AppendEvent
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.replies import STORED, Lease

from .hot_path_server import append_event, cpu_s, leases_of, listener

LOG_TTL_MS = 120_000
CALL_SIZE = 128

Append = Callable[[list[AppendEvent]], Awaitable[list[int]]]


class Prototype:
    """Its scripts and its way of calling them, on our keys."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self._common = import_module("common")
        # Its key prefix is a constant of that module.
        self._common.P = Keyspace().owners.removesuffix("own")

    def redis_us(self, server: EmbeddedServer, batch: int, steps: int) -> float:
        """The server's CPU time per token."""
        keys = Keyspace()
        with connect(server.url) as client, listener(server, keys, batch):
            leases = leases_of(client, batch)
            source = self._common.Scripts(None).src["append"]
            sha = client.script_load(source)
            began_s = cpu_s(client)
            for seq in range(1, steps + 1):
                for first in range(0, batch, CALL_SIZE):
                    part = [append_event(each, seq) for each in leases[first : first + CALL_SIZE]]
                    codes: Any = client.evalsha(sha, 0, self._common.P, *_flat(part))
                    assert codes == [STORED] * len(part)
            return (cpu_s(client) - began_s) / (batch * steps) * 1e6

    async def publish_us(self, server: EmbeddedServer, batch: int, steps: int) -> list[float]:
        """CPU time of the loop's thread per token, of each step."""
        with connect(server.url) as client:
            leases = leases_of(client, batch)
        redis = aconnect(server.url)
        scripts = self._common.Scripts(redis)

        async def append(events: list[AppendEvent]) -> list[int]:
            codes: list[int] = await scripts("append", *_flat(events))
            return codes

        spent_us = []
        acked = dict.fromkeys((lease.request_id for lease in leases), 0)
        for seq in range(1, steps + 1):
            events = [append_event(lease, seq) for lease in leases]
            began_s = time.thread_time()
            await _write(leases, events, append, acked)
            spent_us.append((time.thread_time() - began_s) / batch * 1e6)
        assert set(acked.values()) == {steps}
        await redis.aclose()
        return spent_us


async def _write(
    leases: list[Lease], events: list[AppendEvent], append: Append, acked: dict[str, int]
) -> None:
    await asyncio.sleep(0)  # as its publisher waits to be told that there is something
    for first in range(0, len(events), CALL_SIZE):
        part = events[first : first + CALL_SIZE]
        codes = await append(part)
        for event, code in zip(part, codes, strict=True):
            if code == STORED:
                acked[event.request_id] = max(acked[event.request_id], event.seq)


def _flat(events: list[AppendEvent]) -> list[Any]:
    return [len(events), LOG_TTL_MS, *(part for event in events for part in event)]
