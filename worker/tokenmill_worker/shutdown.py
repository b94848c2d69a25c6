"""SIGTERM and SIGINT: the first asks for a drain, the second for a prompt end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable


class Shutdown:
    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()

    def listen(self) -> None:
        """Take over the signals of the process; the running loop calls `ask`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        if self.requested.is_set():
            self.urgent.set()
        self.requested.set()

    async def wait(self, work: Awaitable[None], timeout_s: float) -> bool:
        """Whether `work` was done before the time was over or the end became urgent; if not, it
        is cancelled."""
        task = asyncio.ensure_future(work)
        urgent = asyncio.ensure_future(self.urgent.wait())
        try:
            await asyncio.wait(
                (task, urgent), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                task.result()
            return task.done()
        finally:
            task.cancel()
            urgent.cancel()
