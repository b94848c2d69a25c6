"""Steps one ahead: the next is planned and launched before the tokens of the last one are read.

    run n:    plan and launch n    read and book n - 1
    run n + 1:                                           plan and launch n + 1    read and book n

What the plan of n + 1 needs of n is known without its tokens: every request that n samples is one
token longer. The tokens themselves are on the device, where n + 1 takes them from. Whoever ends by
a token of n has a row too many in n + 1, whose sample is dropped when that step is booked.

Nothing counts as computed before it is booked, so what is in flight can be given up at any time:
when a launch or the reading of a step fails, a step of `StepRecovery` follows, with nothing in
flight. Imports no torch.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from .outputs import ModelRunnerOutput, SchedulerOutput
from .scheduler import Scheduler
from .step_recovery import StepRecovery, StepResult

logger = logging.getLogger(__name__)

#: Steps in flight after a run. An interrupted one may leave one more.
_DEPTH = 1


class LaunchedStep(Protocol):
    """A step that the device computes, or has computed."""

    @property
    def must_be_read(self) -> bool:
        """Whether the host took part in choosing a token: then the next plan needs to know it."""

    @property
    def seconds(self) -> float:
        """How long it took, once it has been read."""

    def read(self) -> ModelRunnerOutput:
        """Wait for its end. Raises what went wrong on the device."""


class StepsInFlight:
    """The loop above.

    `launch` raises when a step cannot be launched: then it will not run. `on_landed` is told of
    each step that has ended well, and how long it took, before it is booked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        recovery: StepRecovery,
        launch: Callable[[SchedulerOutput], LaunchedStep],
        *,
        on_landed: Callable[[SchedulerOutput, float], None] = lambda _plan, _seconds: None,
    ) -> None:
        self._scheduler = scheduler
        self._recovery = recovery
        self._launch = launch
        self._on_landed = on_landed
        self._steps: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def run(self) -> Iterator[StepResult]:
        """Launch a step and give those that have ended; book each before asking for the next.

        None at all when everything is still under way. Raises what broke the engine.
        """
        num_left: int | None = 0
        if len(self._steps) <= _DEPTH:
            num_left = self._launch_next()
        has_failed = num_left is None
        while len(self._steps) > (num_left or 0):
            result = self._land()
            if result is None:
                has_failed = True
            else:
                yield result
        if has_failed:
            yield self._recovery.run()

    def _launch_next(self) -> int | None:
        """How many steps may stay in flight now; None if the launch failed."""
        plan = self._scheduler.schedule(ahead=bool(self._steps))
        if not plan.scheduled:
            return 0
        try:
            step = self._launch(plan)
        except Exception as error:  # noqa: BLE001 - the synchronous step finds out what it is
            _note_failure(error)
            return None
        self._steps.append((plan, step))
        self._scheduler.take_off(plan)
        return 0 if step.must_be_read else _DEPTH

    def _land(self) -> StepResult | None:
        """The oldest step, to be booked; None if it failed, and all others were given up too."""
        plan, step = self._steps[0]
        try:
            output = step.read()
        except Exception as error:  # noqa: BLE001 - as above
            _note_failure(error)
            while self._steps:
                self._scheduler.land(self._steps.popleft()[0])
            return None
        self._steps.popleft()
        self._scheduler.land(plan)
        self._scheduler.limits.note_success()
        self._on_landed(plan, step.seconds)
        return StepResult(plan, output)


def _note_failure(error: Exception) -> None:
    # The frames of a failed forward hold its activations.
    traceback.clear_frames(error.__traceback__)
    logger.warning("a step failed (%s): the next one is synchronous", type(error).__name__)
