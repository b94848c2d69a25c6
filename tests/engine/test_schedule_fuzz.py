"""Any schedule drawn at random gives what transformers' `generate` gives a request alone."""

from __future__ import annotations

import pytest
import torch

from support_schedules import Run, subject_of
from support_zoo import SERVED
from tokenmill_engine.outputs import SchedulerOutput

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

FAMILIES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name) for name in SERVED
]


@pytest.mark.parametrize("name", FAMILIES)
def test_any_schedule_equals_generate(name: str) -> None:
    check_schedules(name, is_async=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_schedule_with_steps_one_ahead_equals_generate(name: str) -> None:
    check_schedules(name, is_async=True)


def check_schedules(name: str, *, is_async: bool) -> None:
    for seed in range(SCHEDULES_PER_FAMILY):
        run = Run(subject_of(name), seed, is_async)
        try:
            run.check()
        except AssertionError as error:
            raise AssertionError(f"{name}, schedule {seed}: {error}") from error


def test_the_schedules_are_many_and_do_preempt_and_share() -> None:
    """What the fuzz would be worth nothing without."""
    assert NUM_SCHEDULES >= 500
    for is_async in (False, True):
        runs = [Run(subject_of("llama"), seed, is_async) for seed in range(20, 32)]
        for run in runs:
            run.check()
        assert sum(run.preemptions > 0 for run in runs) >= 2
        assert sum(run.cached_tokens > 0 for run in runs) >= 3
    assert sum(run.late_ends > 0 for run in runs) >= 3
    assert sum(run.failed_steps > 0 for run in runs) >= 3


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
