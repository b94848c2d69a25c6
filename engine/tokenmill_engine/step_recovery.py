"""Steps that may fail: out of memory makes them smaller, any other failure is narrowed down.

Nothing counts as computed before `Scheduler.update_from_output`. A step that failed may therefore
be planned and run again: the same rows are written to the same blocks, none of which can be found
in the prefix cache yet.

**Out of memory.** The step is given back: half of the running requests are preempted, the limits of
a step are halved, and the next, smaller plan is tried at once.

**Anything else.** The requests of the step are computed one at a time. Those that fail even so end
with `StepFailed`; the others keep their token and go on. The engine itself is broken, and the
failure is raised, when all of several requests fail or when, after one failed, it cannot compute
even a token of its own.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from .errors import StepFailed
from .kv_cache_manager import KVCacheManager
from .outputs import ModelRunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput
from .request import Request
from .sampling_params import SamplingParams
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

Compute = Callable[[SchedulerOutput], ModelRunnerOutput]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step to be booked: `plan` and `output` without the requests that `failures` names."""

    plan: SchedulerOutput
    output: ModelRunnerOutput
    failures: tuple[StepFailed, ...] = ()


class StepRecovery:
    """Plans and computes steps until one can be booked.

    `is_out_of_memory` tells a failure that a smaller step may not have.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        *,
        compute: Compute,
        is_out_of_memory: Callable[[Exception], bool],
    ) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._compute = compute
        self._is_out_of_memory = is_out_of_memory

    def run(self) -> StepResult:
        """One step; its plan is empty when there is nothing to compute. Raises what broke the
        engine."""
        while True:
            plan = self._scheduler.schedule()
            if not plan.scheduled:
                return StepResult(plan, ModelRunnerOutput())
            outcome = self._try(plan)
            if isinstance(outcome, ModelRunnerOutput):
                self._scheduler.limits.note_success()
                return StepResult(plan, outcome)
            if not (self._is_out_of_memory(outcome) and self._scheduler.relieve(plan)):
                return self._one_by_one(plan, outcome)
            self._scheduler.stats.oom_retries_total += 1
            logger.warning(
                "out of memory in a step of %d tokens; steps have at most %d now",
                plan.num_batched_tokens,
                self._scheduler.limits.num_tokens,
            )

    def _try(self, plan: SchedulerOutput) -> ModelRunnerOutput | Exception:
        try:
            return self._compute(plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller judges it
            # The frames of the failed forward hold its activations.
            traceback.clear_frames(error.__traceback__)
            return error

    def _one_by_one(self, plan: SchedulerOutput, cause: Exception) -> StepResult:
        done: list[ScheduledRequest] = []
        sampled: list[SampledToken] = []
        failures: list[StepFailed] = []
        for item in plan.scheduled:
            outcome = self._try(SchedulerOutput((item,), item.num_tokens))
            if isinstance(outcome, ModelRunnerOutput):
                done.append(item)
                sampled += outcome.sampled
            elif item.num_tokens == 1 or not self._is_out_of_memory(outcome):
                failures.append(StepFailed(item.request.request_id, type(outcome).__name__))
            # Else it is left as it is: it will be planned again, with fewer rows.
        several_and_all = len(plan.scheduled) > 1 and not done
        if several_and_all or not (done or failures) or (failures and not self._engine_works()):
            raise cause
        self._scheduler.stats.isolated_failures_total += len(failures)
        logger.warning(
            "a step failed (%s); of its %d requests %d fail alone",
            type(cause).__name__,
            len(plan.scheduled),
            len(failures),
        )
        rest = SchedulerOutput(tuple(done), sum(item.num_tokens for item in done), plan.preempted)
        return StepResult(rest, ModelRunnerOutput(tuple(sampled)), tuple(failures))

    def _engine_works(self) -> bool:
        """Whether a token that belongs to nobody can be computed."""
        probe = Request("step-recovery", [0, 0], SamplingParams())
        if not self._kv.allocate(probe, probe.num_tokens):
            return True  # no room to ask: believe the requests that were computed
        try:
            plan = SchedulerOutput((ScheduledRequest(probe, 0, 1),), 1)  # nothing is sampled
            return isinstance(self._try(plan), ModelRunnerOutput)
        finally:
            self._kv.free(probe)
