"""Cancellations that get lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def keep_cancellation(awaitable: Awaitable[T]) -> T:
    """Await, and raise a cancellation that was swallowed meanwhile.

    redis-py sends with `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
    arrives together with the result.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await awaitable
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result
