"""The whole engine on a real model, against transformers' `generate` one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from support_prompts import CONVERSATIONS
from tokenmill_engine.llm import LLM, Generation, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
#: Fewer sequences and rows than the 32 prompts need, so that admission, chunking and mixed steps
#: all happen, and few enough blocks that some requests are preempted.
CRAMPED = {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,
    "max_model_len": 1024,
    "block_size": 8,
    "num_gpu_blocks_override": 128,
}


@torch.inference_mode()
def _reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return result[0, len(prompt) :].tolist()


def _load_reference(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    return [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        for conversation in CONVERSATIONS
    ]


@pytest.fixture(scope="module")
def float32(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), dtype="float32", **CRAMPED)


def _generate(llm: LLM, prompts: list[list[int]]) -> list[Generation]:
    answers = llm.generate(prompts, GREEDY)
    llm.engine.check_invariants()
    return answers


@pytest.mark.slow
def test_float32_is_token_identical_to_generate(
    float32: LLM, smollm2_path: Path, prompts: list[list[int]]
) -> None:
    answers = _generate(float32, prompts)
    assert float32.engine.stats().preemptions_total > 0
    reference = _load_reference(smollm2_path, torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == _reference(reference, prompt, NUM_TOKENS)


def test_float32_agrees_with_generate_on_a_few_prompts(
    float32: LLM, smollm2_path: Path, prompts: list[list[int]]
) -> None:
    some = prompts[::6]
    answers = float32.generate(some, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    reference = _load_reference(smollm2_path, torch.float32)
    assert [answer.token_ids for answer in answers] == [
        _reference(reference, prompt, 16) for prompt in some
    ]


@dataclass(frozen=True)
class Tie:
    """Float32 logits where two bfloat16 runs parted: how far the top two, and the two chosen
    tokens from the top, lie apart, in units of the logits and of their spread."""

    top_two_gap: float
    choice_gap: float
    spread: float

    @property
    def is_near(self) -> bool:
        """Two bfloat16 forwards of this model differ by up to 0.05 of the spread (root mean
        square, see the self-test), so tokens closer than twice that may change places."""
        return self.choice_gap <= 0.1 * self.spread


@torch.inference_mode()
def _tie(model: PreTrainedModel, token_ids: list[int], choices: tuple[int, int]) -> Tie:
    logits = model(torch.tensor([token_ids])).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    lowest = min(float(logits[token]) for token in choices)
    return Tie(first - second, first - lowest, float(logits.std()))


@pytest.mark.slow
def test_bfloat16_differs_from_generate_only_at_near_ties(
    smollm2_path: Path, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = _generate(LLM(str(smollm2_path), dtype="bfloat16", **CRAMPED), prompts)
    in_bfloat16 = _load_reference(smollm2_path, torch.bfloat16)
    in_float32 = _load_reference(smollm2_path, torch.float32)
    lines: list[str] = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = _reference(in_bfloat16, prompt, NUM_TOKENS)
        if answer.token_ids == expected:
            continue
        pairs = zip(answer.token_ids, expected, strict=True)
        first = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
        choices = answer.token_ids[first], expected[first]
        tie = _tie(in_float32, prompt + expected[:first], choices)
        lines.append(f"prompt {number:2d} differs first at token {first:2d}: {tie}")
        assert tie.is_near, lines[-1]
    with capsys.disabled():
        equal = len(prompts) - len(lines)
        print(f"\nbfloat16: {equal} of {len(prompts)} prompts identical to generate")  # noqa: T201
        print("\n".join(lines))  # noqa: T201
