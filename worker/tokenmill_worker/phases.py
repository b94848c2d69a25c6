"""Progress of loading, one log line for each phase with its seconds."""

from __future__ import annotations

import logging
import time

from .logs import fields

logger = logging.getLogger(__name__)


class Phases:
    """Call it with the name of each phase when the phase begins. Safe on any one thread."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._phase_began_s = self._began_s
        self._phase: str | None = None

    @property
    def seconds(self) -> float:
        """Since the first moment."""
        return round(time.monotonic() - self._began_s, 2)

    def __call__(self, phase: str) -> None:
        self.end()
        self._phase, self._phase_began_s = phase, time.monotonic()
        logger.debug("loading", extra=fields(phase=phase))

    def end(self) -> None:
        """The last phase is over."""
        if self._phase is not None:
            seconds = round(time.monotonic() - self._phase_began_s, 2)
            logger.info("loaded", extra=fields(phase=self._phase, seconds=seconds))
        self._phase = None
