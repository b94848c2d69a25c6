"""Progress of starting: one log line for each phase with its seconds, and all of them for the
metrics."""

from __future__ import annotations

import logging
import re
import time

import psutil

from .logs import fields

logger = logging.getLogger(__name__)

#: What a phase says in words and parentheses beyond its first words may differ between starts.
_FIRST_WORDS = re.compile(r"[a-z]+(?:[ -][a-z]+)*")


class Phases:
    """Call it with the name of each phase when the phase begins. Safe on any one thread.

    The first phase, `starting Python`, began with the process.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic() - _process_age_s()
        self._phase_began_s = self._began_s
        self._phase: str | None = "starting Python"
        self._durations_s: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Since the process began."""
        return time.monotonic() - self._began_s

    @property
    def durations_s(self) -> dict[str, float]:
        """Of the phases that are over, by label: `reading the weights` is `reading_the_weights`."""
        return dict(self._durations_s)

    def __call__(self, phase: str) -> None:
        self.end()
        self._phase, self._phase_began_s = phase, time.monotonic()
        logger.debug("loading", extra=fields(phase=phase))

    def end(self) -> None:
        """The last phase is over."""
        if self._phase is not None:
            seconds = time.monotonic() - self._phase_began_s
            label = _label(self._phase)
            self._durations_s[label] = self._durations_s.get(label, 0.0) + seconds
            logger.info("loaded", extra=fields(phase=self._phase, seconds=round(seconds, 2)))
        self._phase = None


def _label(phase: str) -> str:
    words = _FIRST_WORDS.match(phase.lower())
    return re.sub(r"[ -]", "_", words[0]) if words else "other"


def _process_age_s() -> float:
    return max(time.time() - psutil.Process().create_time(), 0.0)
