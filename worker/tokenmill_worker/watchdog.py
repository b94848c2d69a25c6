"""What hangs ends the process: its supervisor starts another, and peers take the leases.

Two things can hang. The engine: seen by the event loop. And the loop itself, or whoever holds the
interpreter's lock: seen by a timer of faulthandler, which needs neither.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
from collections.abc import Callable

from .errors import EngineStalled
from .logs import fields

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks at `busy_s`, the age of the engine's present call, until it is over `limit_s`."""

    def __init__(self, busy_s: Callable[[], float], limit_s: float) -> None:
        self._busy_s = busy_s
        self._limit_s = limit_s

    async def run(self) -> None:
        try:
            while True:
                # Wound up again at every round. It writes the stacks, and exits with status 1.
                faulthandler.dump_traceback_later(self._limit_s, exit=True)
                await asyncio.sleep(min(1.0, self._limit_s / 4))
                if self._busy_s() > self._limit_s:
                    self._end_process()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end_process(self) -> None:
        logger.critical("engine stalled", extra=fields(seconds=round(self._busy_s(), 1)))
        faulthandler.dump_traceback(all_threads=True)
        # Not sys.exit: the engine's thread cannot be stopped, and would hold up an orderly end.
        os._exit(EngineStalled.exit_code)
