"""The runner: steps against plain forwards, without masks, beside other runners."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import PreTrainedModel, masking_utils

from support_models import (
    make_step,
    random_prompts,
    reference,
    run_batched,
    tiny_config,
    tiny_model,
    tiny_runner,
)
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.outputs import SampledToken, ScheduledRequest, SchedulerOutput


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def runner(model: PreTrainedModel) -> ModelRunner:
    return tiny_runner(model)


def greedy(
    logits: torch.Tensor,
    requests: tuple[ScheduledRequest, ...],
    *,
    settings: torch.Tensor | None = None,
) -> tuple[SampledToken, ...]:
    assert settings is None
    assert len(requests) == len(logits)
    return tuple(SampledToken(int(token)) for token in logits.argmax(-1))


def test_one_token_for_each_request_that_reached_its_newest(runner: ModelRunner) -> None:
    whole, half, other = [5, 6, 7], [8, 9, 10, 11], [12]
    step = make_step([(whole, 0, 3, [3]), (half, 0, 2, [9]), (other, 0, 1, [0])])
    output = runner.execute(step, greedy)
    assert len(output.sampled) == 2
    alone = [
        runner.execute(make_step([(tokens, 0, len(tokens), [20])]), greedy).sampled[0]
        for tokens in (whole, other)
    ]
    assert list(output.sampled) == alone


def test_a_step_without_a_finished_row_samples_nothing(runner: ModelRunner) -> None:
    step = make_step([([5, 6, 7], 0, 2, [3])])
    assert runner.compute_logits(step).shape == (0, 300)

    def never(*_: object) -> tuple[SampledToken, ...]:
        raise AssertionError("there is nothing to sample")

    assert runner.execute(step, never).sampled == ()


def test_the_observer_sees_float32_logits_in_sampling_order(runner: ModelRunner) -> None:
    seen: list[tuple[SchedulerOutput, torch.Tensor]] = []
    step = make_step([([5, 6], 0, 2, [3]), ([8, 9], 0, 1, [4]), ([7], 0, 1, [5])])
    runner.on_logits = lambda output, logits: seen.append((output, logits))
    try:
        logits = runner.compute_logits(step)
    finally:
        runner.on_logits = None
    assert seen[0][0] is step
    assert seen[0][1] is logits
    assert logits.shape == (2, 300)
    assert logits.dtype is torch.float32


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_no_mask_is_built(class_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner(tiny_model(class_name, **tiny_config(sliding_window=7, head_dim=16)))
    built: list[str] = []
    for name, build in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.items():

        def spy(*args: object, _name: str = name, _build: object = build, **kw: object) -> object:
            built.append(_name)
            return _build(*args, **kw)

        monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, spy)
    runner.compute_logits(make_step([([5, 6, 7], 0, 3, [3]), ([8], 0, 1, [4])]))
    assert built == []
    runner.model.set_attn_implementation("eager")
    runner.model(torch.tensor([[5, 6, 7]]))
    assert set(built) == {"eager"}  # the spies do see what the model builds otherwise


def test_the_model_cannot_be_called_behind_the_runner(runner: ModelRunner) -> None:
    with pytest.raises(RuntimeError, match="call it through the engine"):
        runner.model(torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (1, 4), (3, 2)])
def test_warm_up_survives_the_smallest_cache(
    model: PreTrainedModel, num_blocks: int, block_size: int
) -> None:
    small = tiny_runner(model, num_gpu_blocks_override=num_blocks, block_size=block_size)
    assert small.kv_cache.num_blocks == num_blocks


def test_profile_runs_the_largest_step(runner: ModelRunner) -> None:
    steps: list[SchedulerOutput] = []
    runner.on_logits = lambda output, _: steps.append(output)
    try:
        runner.profile(num_rows=23, num_seqs=5, max_model_len=100)
    finally:
        runner.on_logits = None
    assert [item.num_tokens for item in steps[0].scheduled] == [5, 5, 5, 4, 4]
    assert all(item.samples for item in steps[0].scheduled)


def test_two_runners_in_two_threads_do_not_meet() -> None:
    """Windows differ and blocks overlap: a context that leaks would show."""
    models = [tiny_model("MistralForCausalLM", **tiny_config(sliding_window=w)) for w in (3, 9)]
    prompts = random_prompts(models[0], (13, 30))
    wanted = [[reference(model, prompt, 8) for prompt in prompts] for model in models]
    runners = [tiny_runner(model) for model in models]
    results: dict[int, list[torch.Tensor]] = {}

    def work(number: int) -> None:
        continuations = [generation.token_ids for generation in wanted[number]]
        for seed in range(3):
            results[number] = run_batched(runners[number], prompts, continuations, seed=seed)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, generations in enumerate(wanted):
        for got, generation in zip(results[number], generations, strict=True):
            torch.testing.assert_close(got, generation.logits, rtol=0, atol=1e-3)
