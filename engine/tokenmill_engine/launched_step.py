"""A step that was launched, and what the host reads of it when it has ended."""

from __future__ import annotations

import time

import torch

from .outputs import ModelRunnerOutput
from .sampler import Drawn
from .transfers import Fetch, new_event


class LaunchedStep:
    """Make it before anything of the step is launched, and say `is_launched` behind it all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawn: Drawn | None = None
        self._fetch: Fetch | None = None
        self._launch_s = -time.monotonic()
        self._began = new_event() if device.type == "cuda" else None
        if self._began is not None:
            self._began.record()

    def is_launched(self, drawn: Drawn | None) -> None:
        """`drawn`: the tokens that the step samples, if any."""
        self._drawn = drawn
        self._fetch = Fetch(None if drawn is None else drawn.token_ids, self._device)
        self._launch_s += time.monotonic()

    @property
    def must_be_read(self) -> bool:
        """Whether the host took part in choosing a token."""
        return self._drawn is not None and self._drawn.by_host

    @property
    def seconds(self) -> float:
        """From the end of the step before, or from its launch if that was later, to its end."""
        if self._began is None or self._fetch is None:
            return self._launch_s  # a CPU computes while it launches
        return self._fetch.seconds_since(self._began)

    def read(self) -> ModelRunnerOutput:
        """Waits for the end. Raises RuntimeError for what went wrong on the device."""
        token_ids = [] if self._fetch is None else self._fetch.values()
        return ModelRunnerOutput(() if self._drawn is None else self._drawn.report(token_ids))
