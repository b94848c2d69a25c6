"""Random schedules through the real scheduler, cache and runner, and what must come of them.

A `Run` draws arrivals, step budgets, pool sizes small enough to preempt, shared prefixes, policies,
aborts, stop tokens and resumed requests; whatever the schedule, every request must get the tokens
and the logits that transformers' `generate` gives it alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from support_models import BLOCK_SIZE, Generation, reference, tiny_model
from support_zoo import SERVED
from tokenmill_engine.checkpoint import LoadedModel
from tokenmill_engine.config import EngineConfig, SchedulerConfig
from tokenmill_engine.generation_defaults import GenerationRules
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.launched_step import LaunchedStep
from tokenmill_engine.model_loader import ModelFacts, build_runner
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.outputs import ModelRunnerOutput, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import Sampler
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.scheduler import Scheduler
from tokenmill_engine.step_recovery import StepRecovery
from tokenmill_engine.steps_in_flight import StepsInFlight

TOLERANCE = 2e-3
MAX_TOKENS = 10
NUM_BLOCKS = 48


@dataclass(frozen=True)
class Subject:
    """One family: its runner, and what `generate` says to each prompt."""

    runner: ModelRunner
    facts: ModelFacts
    prompts: list[list[int]]
    wanted: list[Generation]


@cache
def subject_of(name: str) -> Subject:
    variant = SERVED[name]
    model = tiny_model(variant.class_name, **variant.config)
    rng = random.Random(name)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    shared = [rng.randrange(5, vocab_size) for _ in range(18)]
    prompts = [
        shared[: rng.choice((0, 8, 12, 18))]
        + [rng.randrange(5, vocab_size) for _ in range(rng.choice((1, 3, 6, 13, 24)))]
        for _ in range(7)
    ]
    prompts.append(list(prompts[0]))  # all of it may be found in the prefix cache
    wanted = [reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    config = EngineConfig(
        model="tiny",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        skip_self_test=True,
    )
    runner, facts = build_runner(LoadedModel(model), config)
    return Subject(runner, facts, prompts, wanted)


@dataclass
class Run:
    """One schedule, drawn from `seed`; with `is_async`, steps run one ahead, and some of them fail:
    when they are launched, or when they are read."""

    subject: Subject
    seed: int
    is_async: bool = False
    preemptions: int = 0
    cached_tokens: int = 0
    late_ends: int = 0  # requests that ended while they had rows in flight
    failed_steps: int = 0
    worst: float = 0.0
    unforeseen: list[Exception] = field(default_factory=list)
    wanted: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        facts = self.subject.facts
        longest = max(len(prompt) for prompt in self.subject.prompts) + MAX_TOKENS
        smallest = -(-longest // BLOCK_SIZE)
        num_blocks = rng.choice((smallest, smallest + 3, smallest + 6, 2 * smallest, NUM_BLOCKS))
        num_seqs = min(rng.choice((1, 2, 4, 8)), facts.max_num_batched_tokens)
        self.kv = KVCacheManager(
            min(num_blocks, NUM_BLOCKS), BLOCK_SIZE, enable_prefix_caching=rng.random() < 0.8
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=rng.randint(num_seqs, facts.max_num_batched_tokens),
                max_model_len=facts.max_model_len,
                policy=rng.choice(("fcfs", "priority")),
                max_overtakes=rng.choice((0, 1, 8)),
                rope_switch_tokens=facts.rope_switch_tokens,
            ),
            self.kv,
        )
        self.runner = self.subject.runner
        self.runner.kv_cache.fill(float("nan"))
        self.sampler = Sampler(rules=GenerationRules(), encode_bad_words=lambda _: ())
        self.requests = [self._request(number) for number in range(len(self.subject.prompts))]
        self.aborted = {number for number in range(len(self.requests)) if rng.random() < 0.1}
        self.in_flight = StepsInFlight(self.scheduler, self._recovery(), self._launch)

    def _request(self, number: int) -> Request:
        """Some come as a successor would get them, with a part of their output known; some have a
        stop token, which is seen a step late when steps run ahead."""
        rng, wanted = self.rng, self.subject.wanted[number].token_ids
        known = rng.choice((0, 0, 0, 1, 4))
        stop_ids: tuple[int, ...] = ()
        later = [token for token in wanted[known:] if token not in wanted[:known]]
        if later and rng.random() < 0.4:
            stop_ids = (rng.choice(later),)
            wanted = wanted[: wanted.index(stop_ids[0]) + 1]
        self.wanted.append(wanted)
        return Request(
            str(number),
            self.subject.prompts[number],
            SamplingParams(max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=stop_ids),
            output_token_ids=wanted[:known],
            priority=rng.choice((0, 1)),
        )

    def _recovery(self) -> StepRecovery:
        return StepRecovery(
            self.scheduler, self.kv, compute=self._compute, is_out_of_memory=lambda _: False
        )

    def check(self) -> None:
        self.runner.on_logits = self._compare
        try:
            self._run()
        finally:
            self.runner.on_logits = None
        self.preemptions = self.scheduler.stats.preemptions_total
        self.cached_tokens = self.scheduler.stats.prefix_cache_hits_total
        for number, request in enumerate(self.requests):
            if number not in self.aborted:
                assert request.output_token_ids == self.wanted[number]
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert self.worst < TOLERANCE

    def _run(self) -> None:
        waiting = list(self.requests)
        self.rng.shuffle(waiting)
        rate = self.rng.choice((0.4, 0.9))
        while waiting or self.scheduler.has_unfinished_requests or len(self.in_flight):
            while waiting and self.rng.random() < rate:
                self.scheduler.add(waiting.pop())
            self._abort_some()
            if self.is_async:
                self._step_ahead()
            else:
                self._step()
            self.scheduler.check_invariants()

    def _step(self) -> None:
        step = self.scheduler.schedule()
        if step.scheduled:
            self.scheduler.update_from_output(step, self._compute(step))

    def _step_ahead(self) -> None:
        for result in self.in_flight.run():
            assert not result.failures
            for request in self.scheduler.update_from_output(result.plan, result.output):
                self.late_ends += request.is_finished and request.num_rows_in_flight > 0
            self.scheduler.check_invariants()
        assert len(self.in_flight) <= 1
        assert self.unforeseen == []

    def _abort_some(self) -> None:
        for number in self.aborted:
            if self.requests[number].num_output_tokens >= 3:
                self.scheduler.abort(str(number))

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute(step, self.sampler)

    def _launch(self, step: SchedulerOutput) -> LaunchedStep:
        try:
            launched = self.runner.launch(step, self.sampler)
        except Exception as error:
            self.unforeseen.append(error)  # the engine takes it for one of ours
            raise
        self._fail_at_times()  # K/V are written by then
        launched.read = self._late_failure(launched)  # type: ignore[method-assign]
        return launched

    def _late_failure(self, launched: LaunchedStep) -> Callable[[], ModelRunnerOutput]:
        read = launched.read

        def fails_at_times() -> ModelRunnerOutput:
            self._fail_at_times()
            try:
                return read()
            except Exception as error:
                self.unforeseen.append(error)
                raise

        return fails_at_times

    def _fail_at_times(self) -> None:
        if self.rng.random() < 0.03:
            self.failed_steps += 1
            raise torch.OutOfMemoryError("as it happens")

    def _compare(self, step: SchedulerOutput, logits: torch.Tensor) -> None:
        """Every row of logits with the one that `generate` had there."""
        for item, row in zip(step.sampling, logits, strict=True):
            wanted = self.subject.wanted[int(item.request.request_id)]
            expected = wanted.logits[item.request.next_output_index]
            self.worst = max(self.worst, float((row - expected).abs().max()))
