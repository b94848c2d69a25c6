"""Random schedules through the real scheduler, cache and runner, against one request at a time.

Arrivals, step budgets, pool sizes small enough to preempt, shared prefixes, policies, aborts and
resumed requests are drawn at random; whatever the schedule, every request must get the tokens and
the logits that transformers' `generate` gives it alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from support_models import BLOCK_SIZE, Generation, reference, tiny_model
from support_zoo import SERVED
from tokenmill_engine.checkpoint import LoadedModel
from tokenmill_engine.config import EngineConfig, SchedulerConfig
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.model_loader import ModelFacts, build_runner
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.scheduler import Scheduler

TOLERANCE = 2e-3
MAX_TOKENS = 10
NUM_BLOCKS = 48
#: One for each thing that schedules could get wrong: plain, windows, chunks, the LongRoPE switch,
#: sinks, latent attention, several calls per layer, experts.
FAST = (
    "llama",
    "qwen3 sliding",
    "llama4",
    "phi4 longrope partial",
    "gpt oss",
    "deepseek v3",
    "diffllama",
    "phimoe sliding",
)
SCHEDULES_PER_FAMILY = 5
NUM_SCHEDULES = SCHEDULES_PER_FAMILY * len(SERVED)


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
    """One schedule, drawn from `seed`."""

    subject: Subject
    seed: int
    preemptions: int = 0
    cached_tokens: int = 0
    worst: float = 0.0
    arrivals: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        facts = self.subject.facts
        longest = max(len(prompt) for prompt in self.subject.prompts) + MAX_TOKENS
        smallest = -(-longest // BLOCK_SIZE)
        num_blocks = rng.choice((smallest, smallest + 3, 2 * smallest, NUM_BLOCKS))
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
        self.requests = [self._request(number) for number in range(len(self.subject.prompts))]
        self.aborted = {number for number in range(len(self.requests)) if rng.random() < 0.1}

    def _request(self, number: int) -> Request:
        """Some come as a successor would get them: with a part of their output known."""
        rng, wanted = self.rng, self.subject.wanted[number]
        known = rng.choice((0, 0, 0, 1, 4))
        return Request(
            str(number),
            self.subject.prompts[number],
            SamplingParams(max_tokens=MAX_TOKENS, temperature=0),
            output_token_ids=wanted.token_ids[:known],
            priority=rng.choice((0, 1)),
        )

    def check(self) -> None:
        waiting = list(self.requests)
        self.rng.shuffle(waiting)
        while waiting or self.scheduler.has_unfinished_requests:
            while waiting and self.rng.random() < 0.4:
                self.scheduler.add(waiting.pop())
            self._abort_some()
            step = self.scheduler.schedule()
            if step.scheduled:
                self.scheduler.update_from_output(step, self._compute(step))
            self.scheduler.check_invariants()
        self.preemptions = self.scheduler.stats.preemptions_total
        self.cached_tokens = self.scheduler.stats.prefix_cache_hits_total
        for number, request in enumerate(self.requests):
            if number not in self.aborted:
                assert request.output_token_ids == self.subject.wanted[number].token_ids
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert self.worst < TOLERANCE

    def _abort_some(self) -> None:
        for number in self.aborted:
            if self.requests[number].num_output_tokens >= 3:
                self.scheduler.abort(str(number))

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Greedy tokens; every row of logits is compared with the one `generate` had there."""
        logits = self.runner.compute_logits(step)
        for item, row in zip(step.sampling, logits, strict=True):
            wanted = self.subject.wanted[int(item.request.request_id)]
            expected = wanted.logits[item.request.num_output_tokens]
            self.worst = max(self.worst, float((row - expected).abs().max()))
        return ModelRunnerOutput(tuple(SampledToken(int(row.argmax())) for row in logits))


FAMILIES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name) for name in SERVED
]


@pytest.mark.parametrize("name", FAMILIES)
def test_any_schedule_equals_generate(name: str) -> None:
    for seed in range(SCHEDULES_PER_FAMILY):
        run = Run(subject_of(name), seed)
        try:
            run.check()
        except AssertionError as error:
            raise AssertionError(f"{name}, schedule {seed}: {error}") from error


def test_the_schedules_are_many_and_do_preempt_and_share() -> None:
    """What the fuzz would be worth nothing without."""
    assert NUM_SCHEDULES >= 500
    runs = [Run(subject_of("llama"), seed) for seed in range(12)]
    for run in runs:
        run.check()
    assert sum(run.preemptions > 0 for run in runs) >= 2
    assert sum(run.cached_tokens > 0 for run in runs) >= 3


def test_a_wrong_cache_is_noticed() -> None:
    """The comparison can fail: K/V of a block that is overwritten shows in the logits."""
    run = Run(subject_of("llama"), seed=1)
    original = run.runner.compute_logits

    def spoiled(step: SchedulerOutput) -> torch.Tensor:
        for layer in run.runner.kv_cache.layers.values():
            block = step.scheduled[0].request.block_ids[0]
            layer.key[block] = layer.key[block].nan_to_num() + 0.5
        return original(step)

    run.runner.compute_logits = spoiled  # type: ignore[method-assign]
    try:
        with pytest.raises(AssertionError):
            run.check()
    finally:
        del run.runner.compute_logits
