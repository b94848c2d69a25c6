"""A device that computes as late as it may: what was launched is done when the host waits for it.

Launches take what a real one has on its side by then: rows and block tables. Blocks that change
hands before the end of a step that writes to them, or K/V that nobody has written, are noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support_engine import InventedModel, invented_token, kv_of
from tokenmill_engine.outputs import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler import Scheduler
from tokenmill_engine.step_recovery import StepRecovery
from tokenmill_engine.steps_in_flight import StepsInFlight

#: The tokens of these are chosen with the host's help.
BY_HOST_PRIORITY = 2
_NOBODY_KNOWS = -1  # a token that was sampled, but given up or dropped


class _Broken(Exception):
    """What a step fails with."""


@dataclass(eq=False)
class _Step:
    device: LateDevice
    plan: SchedulerOutput
    tables: list[list[int]]  # of its requests, at the launch
    fails_when_read: bool = False
    output: ModelRunnerOutput | None = None
    seconds: float = 0.0

    @property
    def must_be_read(self) -> bool:
        return any(item.request.priority == BY_HOST_PRIORITY for item in self.plan.sampling)

    def read(self) -> ModelRunnerOutput:
        with self.device._noting():
            self.device.finish(self)
        if self.fails_when_read:
            self.device.finish_all()
            raise _Broken
        assert self.output is not None
        return self.output


@dataclass
class LateDevice(InventedModel):
    """`failures` says of each launch when it fails: "launch", "read", or not at all ("")."""

    failures: Iterator[str] = field(default_factory=lambda: iter(()))

    def __post_init__(self) -> None:
        self.wrong: list[AssertionError] = []  # what the engine would take for a failed step
        self.under_way: deque[_Step] = deque()
        self.num_launched_ahead = self.num_dropped = 0

    def launch(self, plan: SchedulerOutput) -> _Step:
        with self._noting():
            self._check_plan(plan)
        self.num_launched_ahead += any(item.request.num_rows_in_flight for item in plan.scheduled)
        failure = next(self.failures, "")
        if failure == "launch":
            raise _Broken
        tables = [list(item.request.block_ids) for item in plan.scheduled]
        step = _Step(self, plan, tables, fails_when_read=failure == "read")
        self.under_way.append(step)
        return step

    def compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Synchronously, and not before the end of what was launched."""
        with self._noting():
            self.finish_all()
            self._check_plan(plan)
            return self._run(plan)

    def finish(self, step: _Step) -> None:
        while step.output is None:
            oldest = self.under_way.popleft()
            for item, table in zip(oldest.plan.scheduled, oldest.tables, strict=True):
                assert item.request.block_ids[: len(table)] == table, "its blocks were taken away"
            oldest.output = self._run(oldest.plan)

    def finish_all(self) -> None:
        while self.under_way:
            self.finish(self.under_way[-1])

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.wrong.append(error)
            raise

    def _check_plan(self, plan: SchedulerOutput) -> None:
        config = self.scheduler.config
        assert 0 < plan.num_batched_tokens <= config.max_num_batched_tokens
        assert len(plan.scheduled) <= self.scheduler.num_running <= config.max_num_seqs
        for item in plan.scheduled:
            request, size = item.request, kv_of(self.scheduler).block_size
            assert item.num_tokens > 0
            assert item.start == request.planned_start, "rows must be contiguous"
            assert item.end <= request.planned_length
            assert len(request.block_ids) * size >= item.end
            assert request.num_unread_tokens <= 1
            is_last = request.next_output_index >= request.params.max_tokens
            assert not is_last, "it can have no further token"

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for item in plan.scheduled:  # all reads before any write of the step
            prints, slots = self._prints(item), self._slots(item.request)
            if _NOBODY_KNOWS not in prints[: item.start]:
                found = [self.slots.get(slot) for slot in slots[: item.start]]
                assert found == prints[: item.start], f"{item}: stale K/V"
        written: set[tuple[int, int]] = set()
        for item in plan.scheduled:
            prints, slots = self._prints(item), self._slots(item.request)
            self.num_dropped += item.request.is_finished
            for position in range(item.start, item.end):
                self._check_writable(item.request, slots[position], written)
                written.add(slots[position])
                self.slots[slots[position]] = prints[position]
        return ModelRunnerOutput(tuple(self._sample(item) for item in plan.sampling))

    def _prints(self, item: ScheduledRequest) -> list[int]:
        prints = self._fingerprints(item.request)[: item.end]
        return prints + [_NOBODY_KNOWS] * (item.end - len(prints))

    def _sample(self, item: ScheduledRequest) -> SampledToken:
        known = item.request.token_ids[: item.end]
        return SampledToken(invented_token(known) if len(known) == item.end else _NOBODY_KNOWS)


class AheadDriver:
    """Steps a scheduler one ahead on a late device, and checks the books around every step."""

    def __init__(self, scheduler: Scheduler, failures: Iterable[str] = ()) -> None:
        self.scheduler = scheduler
        self.device = LateDevice(scheduler, failures=iter(failures))
        recovery = StepRecovery(
            scheduler,
            kv_of(scheduler),
            compute=self.device.compute,
            is_out_of_memory=lambda _: False,
        )
        self.in_flight = StepsInFlight(scheduler, recovery, self.device.launch)
        self.requests: list[Request] = []
        self.num_runs = 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests.append(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished_requests or len(self.in_flight) > 0

    def step(self) -> list[Request]:
        """Those that got a token."""
        updated: list[Request] = []
        self.num_runs += 1
        for result in self.in_flight.run():
            assert not result.failures
            self.scheduler.check_invariants()
            updated += self.scheduler.update_from_output(result.plan, result.output)
            self.scheduler.check_invariants()
        self.scheduler.check_invariants()
        if self.device.wrong:
            raise self.device.wrong[0]
        assert len(self.in_flight) <= 1
        return updated
