"""Making up for cancellations that get lost."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if this task was cancelled before and did not notice.

    redis-py sends with `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that comes
    when the send has just been done. A loop that talks to Redis calls this in every round, between
    the calls and the pause: else a task group could wait for the pause, or for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
