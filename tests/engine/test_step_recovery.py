"""Steps that fail, on a real tiny model: neighbours get exactly what `generate` says.

The model is made to fail after its whole forward, when the K/V of every row of the step has been
written; what was written is spoiled first, so that whoever relies on it gets NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from support_models import random_prompts, reference, tiny_config, tiny_model
from support_tokenizers import byte_level_bpe
from tokenmill_engine.errors import StepFailed
from tokenmill_engine.llm import LLM, SamplingParams
from tokenmill_engine.llm_engine import LLMEngine
from tokenmill_engine.out_of_memory import is_out_of_memory
from tokenmill_engine.outputs import RequestOutput
from tokenmill_engine.request import FinishReason

VOCABULARY = 420
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
MODEL = tiny_model(**tiny_config(vocab_size=VOCABULARY))
PROMPTS = random_prompts(MODEL, (3, 9, 14, 6, 21), seed=3)
WANTED = [reference(MODEL, prompt, MAX_TOKENS).token_ids for prompt in PROMPTS]
#: In no prompt and in no answer.
POISON = min(set(range(5, VOCABULARY)) - {token for row in PROMPTS + WANTED for token in row})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(folder)
    byte_level_bpe()._hf.save_pretrained(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(folder: Path, request: pytest.FixtureRequest) -> LLMEngine:
    return LLM(
        str(folder),
        async_scheduling=request.param,
        block_size=4,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        skip_self_test=True,
    ).engine


@contextmanager
def failing(
    engine: LLMEngine, failure: Callable[[list[int]], Exception | None]
) -> Iterator[list[int]]:
    """`failure` gets the token ids of each forward's rows; yields the sizes of the failed."""
    failed: list[int] = []

    def after_forward(_model: object, _args: object, kwargs: dict, _output: object) -> None:
        token_ids = kwargs["input_ids"][0].tolist()
        error = failure(token_ids)
        if error is not None:
            failed.append(len(token_ids))
            raise error

    handle = engine.runner.model.register_forward_hook(after_forward, with_kwargs=True)
    try:
        yield failed
    finally:
        handle.remove()


def poisoned(token_ids: list[int]) -> Exception | None:
    return RuntimeError(f"cannot compute {token_ids}") if POISON in token_ids else None


def add_all(engine: LLMEngine) -> None:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{index}", prompt, GREEDY)


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def check_neighbours(outputs: dict[str, list[RequestOutput]]) -> None:
    assert [tokens_of(outputs[f"r{index}"]) for index in range(len(PROMPTS))] == WANTED


def check_failed(outputs: list[RequestOutput]) -> None:
    last = outputs[-1]
    assert (last.finish_reason, last.new_token_ids) == (FinishReason.ERROR, ())
    assert isinstance(last.error, StepFailed)
    assert "RuntimeError" in str(last.error)
    assert str(POISON) not in str(last.error)


def test_a_request_that_fails_alone_fails_alone(engine: LLMEngine) -> None:
    add_all(engine)
    engine.add_request("bad", [*PROMPTS[4], POISON], GREEDY)
    with failing(engine, poisoned) as failed:
        outputs = run(engine)
    check_failed(outputs.pop("bad"))
    check_neighbours(outputs)
    # The step, and the request alone. One that was launched ahead is done again as a whole first.
    assert len(failed) == (3 if engine.is_async else 2)
    assert engine.stats().isolated_failures_total == 1


def test_what_a_failed_step_wrote_is_never_found(engine: LLMEngine) -> None:
    """The failed prompt begins like another one, which must not start behind its blocks."""

    def spoil(token_ids: list[int]) -> Exception | None:
        error = poisoned(token_ids)
        if error is not None:
            engine.runner.kv_cache.fill(float("nan"))
        return error

    engine.add_request("bad", [*PROMPTS[4], POISON], GREEDY)
    with failing(engine, spoil):
        check_failed(run(engine)["bad"])
    add_all(engine)
    outputs = run(engine)
    check_neighbours(outputs)
    assert outputs["r4"][0].num_cached_tokens == 0


def test_rows_written_by_a_failed_step_are_written_again(engine: LLMEngine) -> None:
    failures = iter([True])

    def once(_token_ids: list[int]) -> Exception | None:
        if next(failures, False):
            engine.runner.kv_cache.fill(float("nan"))
            return RuntimeError("passes by itself")
        return None

    add_all(engine)
    with failing(engine, once) as failed:
        outputs = run(engine)
    check_neighbours(outputs)
    assert len(failed) == 1
    assert engine.stats().isolated_failures_total == 0


def test_a_request_may_fail_in_the_middle_of_its_answer(engine: LLMEngine) -> None:
    index, position = next(
        (index, position)
        for index, answer in enumerate(WANTED)
        for position in range(3, MAX_TOKENS - 1)
        if sum(answer[position] in [*p, *w] for p, w in zip(PROMPTS, WANTED, strict=True)) == 1
        and answer.index(answer[position]) == position
    )
    culprit = WANTED[index][position]

    def failure(token_ids: list[int]) -> Exception | None:
        return RuntimeError("secret") if culprit in token_ids else None

    add_all(engine)
    with failing(engine, failure):
        outputs = run(engine)
    bad = outputs.pop(f"r{index}")
    assert tokens_of(bad) == WANTED[index][: position + 1]
    assert isinstance(bad[-1].error, StepFailed)
    for other in outputs:
        assert tokens_of(outputs[other]) == WANTED[int(other[1:])]


@pytest.mark.parametrize("even_a_single_token", [True, False])
def test_when_all_of_several_fail_the_engine_is_broken(
    engine: LLMEngine, even_a_single_token: bool
) -> None:
    def failure(token_ids: list[int]) -> Exception | None:
        fails = even_a_single_token or len(token_ids) > 1
        return RuntimeError("the device is gone") if fails else None

    add_all(engine)
    with failing(engine, failure), pytest.raises(RuntimeError, match="is gone"):
        engine.step()


def test_a_single_request_is_blamed_only_if_the_engine_works_otherwise(engine: LLMEngine) -> None:
    engine.add_request("bad", [7, POISON], GREEDY)
    with failing(engine, poisoned):
        check_failed(run(engine)["bad"])
    engine.add_request("good", PROMPTS[0], GREEDY)
    with failing(engine, lambda _: RuntimeError("gone")), pytest.raises(RuntimeError, match="gone"):
        engine.step()


def test_a_failure_that_then_breaks_everything_is_raised(engine: LLMEngine) -> None:
    """As an error on the device does: who comes after the culprit is not guilty as well."""
    seen = []

    def failure(token_ids: list[int]) -> Exception | None:
        seen.append(token_ids)
        is_broken = any(POISON in earlier for earlier in seen[1:])
        return RuntimeError("sticky") if is_broken or POISON in token_ids else None

    engine.add_request("good", PROMPTS[0], GREEDY)
    engine.add_request("bad", [7, POISON], GREEDY)
    engine.add_request("later", PROMPTS[1], GREEDY)
    with failing(engine, failure), pytest.raises(RuntimeError, match="sticky"):
        engine.step()


@pytest.mark.parametrize("most_rows", [1, 2, 5, 20])
def test_out_of_memory_makes_steps_smaller_and_changes_no_token(
    engine: LLMEngine, most_rows: int
) -> None:
    def too_large(token_ids: list[int]) -> Exception | None:
        return torch.OutOfMemoryError("too much") if len(token_ids) > most_rows else None

    add_all(engine)
    with failing(engine, too_large) as failed:
        outputs = run(engine)
    check_neighbours(outputs)
    stats = engine.stats()
    if engine.is_async:  # steps that were launched ahead are not counted when they fail
        assert 0 < stats.oom_retries_total < len(failed)
    else:
        assert stats.oom_retries_total == len(failed) > 0
    assert stats.isolated_failures_total == 0


def test_steps_grow_again_when_memory_is_back(engine: LLMEngine) -> None:
    add_all(engine)
    tight = iter([True] * 3)
    with failing(engine, lambda _: MemoryError() if next(tight, False) else None):
        early = engine.step()
    limits, config = engine.scheduler.limits, engine.scheduler.config
    assert limits.num_tokens < config.max_num_batched_tokens
    outputs = run(engine)
    endless = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
    for output in reversed(early):
        outputs[output.request_id].insert(0, output)
    for _ in range(3):
        engine.add_request("long", [5], endless)
        run(engine)
    assert limits.num_tokens == config.max_num_batched_tokens
    assert limits.num_seqs == config.max_num_seqs
    check_neighbours(outputs)


def test_a_single_row_that_is_too_much_fails_alone(engine: LLMEngine) -> None:
    def too_much(token_ids: list[int]) -> Exception | None:
        return torch.OutOfMemoryError("too much") if POISON in token_ids else None

    add_all(engine)
    engine.add_request("bad", [POISON], GREEDY)
    with failing(engine, too_much):
        outputs = run(engine)
    assert isinstance(outputs.pop("bad")[-1].error, StepFailed)
    check_neighbours(outputs)
    assert engine.stats().isolated_failures_total == 1


def test_the_allocators_own_errors_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as too_large:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(too_large.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
