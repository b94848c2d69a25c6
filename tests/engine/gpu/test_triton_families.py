"""Whole models with the Triton attention, in ragged chunked batches, against `generate`.

As in `test_zoo`, but with two layers and short prompts: the interpreter needs a tenth of a second
for what a GPU does in microseconds.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_models import random_prompts, reference, run_batched, tiny_model, tiny_runner
from support_zoo import SERVED, F, S
from tokenmill_engine.triton_attention import TritonPagedAttention

PROMPT_TOKENS = (11, 4)
MAX_TOKENS = 3
SPLIT_TOKENS = 8  # so that decode rows are split and merged
TOLERANCE = 2e-3

TWO_LAYERS = {"num_hidden_layers": 2}
BOTH_KINDS = {**TWO_LAYERS, "layer_types": [S, F]}
#: What each has that others do not: its place in the zoo, and how it becomes small.
FAMILIES = {
    "llama": TWO_LAYERS,
    "mistral": TWO_LAYERS,  # a window in all layers
    "qwen3": TWO_LAYERS,  # normalised heads, 24 numbers wide
    "gemma2": BOTH_KINDS,  # soft cap
    "gemma3": BOTH_KINDS,
    "gpt oss": BOTH_KINDS,  # sinks, experts
    "llama4": {**TWO_LAYERS, "no_rope_layers": [1, 0], "moe_layers": [1]},  # chunks
    "deepseek v3": TWO_LAYERS,  # values narrower than keys
    "qwen3 moe": TWO_LAYERS,
}


@pytest.mark.slow  # in the interpreter; whole models that are fused are among the quick tests
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_generate(name: str) -> None:
    variant = SERVED[name]
    model = tiny_model(variant.class_name, **(variant.config | FAMILIES[name]))
    prompts = random_prompts(model, PROMPT_TOKENS)
    wanted = [reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    backend = TritonPagedAttention([], model.device, split_tokens=SPLIT_TOKENS)
    runner = tiny_runner(model, backend=backend, skip_self_test=True)

    logits = run_batched(runner, prompts, [generation.token_ids for generation in wanted])

    got, expected = torch.cat(logits), torch.cat([generation.logits for generation in wanted])
    assert float((got - expected).abs().max()) < TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
