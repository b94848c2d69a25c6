"""In bfloat16 too, what a request is answered does not depend on what it is computed with."""

from __future__ import annotations

import pytest
import torch

from support_models import random_prompts, tiny_config, tiny_model
from support_tokenizers import byte_level_bpe
from tokenmill_engine.kernel_choice import only_torch_multiplies_bfloat16
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.linear_kernel import bfloat16_products
from tokenmill_engine.llm import LLM, Generation, SamplingParams

VOCABULARY = 420
#: Log probabilities show a last bit that greedy tokens mostly hide.
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With room for about three of the requests at once; nothing is cached between requests."""
    try:
        bfloat16_products()
    except KernelUnavailable as why:
        pytest.skip(str(why))
    if only_torch_multiplies_bfloat16():
        pytest.skip("linear layers are torch's here, whose rows depend on their batch")
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352)
    tiny_model(**config).bfloat16().save_pretrained(folder)
    byte_level_bpe()._hf.save_pretrained(folder)
    return LLM(
        str(folder),
        dtype="bfloat16",
        block_size=4,
        num_gpu_blocks_override=60,
        max_num_batched_tokens=50,
        max_num_seqs=12,
        enable_prefix_caching=False,
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    model = tiny_model(**tiny_config(vocab_size=VOCABULARY))
    return random_prompts(model, [1, 3, 40, 17, 33, 64, 9, 25, 16, 48, 5, 31])


def assert_same(some: Generation, other: Generation) -> None:
    assert some.token_ids == other.token_ids
    assert some.logprobs == other.logprobs


def test_tokens_in_a_batch_and_after_preemptions_are_those_of_each_request_alone(
    llm: LLM, prompts: list[list[int]]
) -> None:
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert not any(answer.metrics.num_preemptions for answer in alone)
    together = llm.generate(prompts, GREEDY)
    assert sum(answer.metrics.num_preemptions for answer in together) >= 3
    for some, other in zip(together, alone, strict=True):
        assert_same(some, other)


def test_a_successor_continues_with_the_same_tokens(llm: LLM, prompts: list[list[int]]) -> None:
    """Taken over with any number of tokens, and computed beside another request."""
    engine, prompt = llm.engine, prompts[3]
    whole = llm.generate(prompt, GREEDY)[0]
    for known in range(1, GREEDY.max_tokens):
        engine.add_request("other", prompts[5], GREEDY)
        engine.add_request(
            "successor", prompt, GREEDY,
            output_token_ids=whole.token_ids[:known], emitted_chars=0,
        )  # fmt: skip
        tokens: list[int] = []
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.request_id == "successor":
                    tokens += output.new_token_ids
        assert tokens == whole.token_ids[known:]


def test_the_number_of_threads_changes_nothing(llm: LLM, prompts: list[list[int]]) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = llm.generate(prompts[4:8], GREEDY)
        torch.set_num_threads(3)
        for some, other in zip(llm.generate(prompts[4:8], GREEDY), expected, strict=True):
            assert_same(some, other)
    finally:
        torch.set_num_threads(threads)
