"""What hangs ends the process: its supervisor starts another, and peers take the leases.

Two things can hang: the engine's present call, and the event loop. A thread of its own looks at
both. It counts only time in which it ran itself: a process that was stopped for a while (SIGSTOP,
a paused container, a migrated machine) has not hung, and goes on. Whoever holds the interpreter's
lock for ever stops this thread too: then `/healthz` does not answer, and the leases run out.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from .errors import EngineStalled
from .logs import fields

logger = logging.getLogger(__name__)

#: A look that comes so many times as late as meant: the process did not run in between.
STOPPED_AFTER_LOOKS = 4


class Watchdog:
    """Ends the process when the engine's present call, `busy_s` old, or a round of the event loop
    takes longer than `limit_s`."""

    def __init__(self, busy_s: Callable[[], float], limit_s: float) -> None:
        self._busy_s = busy_s
        self._limit_s = limit_s
        self._every_s = min(1.0, limit_s / 4)
        self._loop_seen_s = time.monotonic()
        self._over = threading.Event()

    async def run(self) -> None:
        self._loop_seen_s = time.monotonic()
        thread = threading.Thread(target=self._look_again_and_again, name="watchdog", daemon=True)
        thread.start()
        try:
            while True:
                self._loop_seen_s = time.monotonic()
                await asyncio.sleep(self._every_s)
        finally:
            self._over.set()

    def _look_again_and_again(self) -> None:
        running_since_s = looked_s = time.monotonic()
        while not self._over.wait(self._every_s):
            now_s = time.monotonic()
            if now_s - looked_s > STOPPED_AFTER_LOOKS * self._every_s:
                running_since_s = now_s
            looked_s = now_s
            ran_s = now_s - running_since_s
            if min(self._busy_s(), ran_s) > self._limit_s:
                self._end_process("engine")
            if min(now_s - self._loop_seen_s, ran_s) > self._limit_s:
                self._end_process("event loop")

    def _end_process(self, what: str) -> None:
        logger.critical("%s stalled", what, extra=fields(limit_s=self._limit_s))
        faulthandler.dump_traceback(all_threads=True)
        # Not sys.exit: what hangs cannot be stopped, and would hold up an orderly end.
        os._exit(EngineStalled.exit_code)
