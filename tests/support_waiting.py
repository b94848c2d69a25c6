"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 20.0


def wait_until(condition: Callable[[], object]) -> None:
    """Returns as soon as `condition()` is true; fails after `PATIENCE_S`."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true"
        time.sleep(0.002)


async def await_until(condition: Callable[[], object]) -> None:
    """`wait_until` for asyncio."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true"
        await asyncio.sleep(0.002)
