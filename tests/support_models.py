"""Builders for tests of the tensor half: tiny models, steps made by hand, caches full of NaN.

`run_batched` feeds a runner with random chunks of several requests, `reference` asks transformers'
`generate` one request at a time; the tests compare the two.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tokenmill_engine.attention import AttentionBackend, AttentionSpec, LayerCache
from tokenmill_engine.checkpoint import LoadedModel
from tokenmill_engine.config import EngineConfig
from tokenmill_engine.model_loader import build_runner
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.outputs import ScheduledRequest, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampling_params import SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 128
MAX_ROWS = 24


def make_step(
    parts: Iterable[tuple[Sequence[int], int, int, Sequence[int]]],
) -> SchedulerOutput:
    """A step of requests given as (token ids, start, end, block table)."""
    scheduled = []
    for number, (token_ids, start, end, block_ids) in enumerate(parts):
        request = Request(f"r{number}", token_ids, SamplingParams())
        request.block_ids = list(block_ids)
        scheduled.append(ScheduledRequest(request, start, end - start))
    return SchedulerOutput(tuple(scheduled), sum(item.num_tokens for item in scheduled))


def nan_filled_cache(
    backend: AttentionBackend, spec: AttentionSpec, num_blocks: int, block_size: int
) -> LayerCache:
    """Of one attention call. Whoever reads a slot that was never written gets NaN."""
    key_shape, value_shape = backend.cache_shapes(spec, num_blocks, block_size)
    return LayerCache(
        torch.full(key_shape, float("nan"), dtype=spec.dtype),
        torch.full(value_shape, float("nan"), dtype=spec.dtype),
    )


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Settings that most decoder-only architectures of transformers understand."""
    return {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }


def tiny_model(class_name: str = "LlamaForCausalLM", **config: Any) -> PreTrainedModel:
    """Random float32 weights, drawn wide: with transformers' own, attention would hardly matter."""
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**(config or tiny_config()))).float().eval()
    generator = torch.Generator().manual_seed(1)
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }

    def draw(shape: torch.Size, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std + mean

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in embeddings:
                parameter.copy_(draw(parameter.shape, 1.0))
            elif parameter.dim() >= 2:
                parameter.copy_(draw(parameter.shape, 1.3 / min(parameter.shape[-2:]) ** 0.5))
            elif "sink" in name:
                parameter.copy_(draw(parameter.shape, 1.0, mean=1.0))
            elif not name.endswith(("A_log", "dt_bias")):  # not any value is legal for these
                parameter.add_(draw(parameter.shape, 0.1))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(draw(buffer.shape, 0.1))
    model.generation_config.cache_implementation = None
    return model


def random_prompts(
    model: PreTrainedModel, lengths: Sequence[int], seed: int = 0
) -> list[list[int]]:
    rng = random.Random(seed)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return [[rng.randrange(5, vocab_size) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Generation:
    """Greedy tokens and the raw logits `[tokens, vocab]` that they were taken from."""

    token_ids: list[int]
    logits: torch.Tensor


@torch.inference_mode()
def reference(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> Generation:
    """By transformers' own `generate`: a batch of one, eager attention, its default cache."""
    model.set_attn_implementation("eager")
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    token_ids = generated.sequences[0, len(prompt) :].tolist()
    return Generation(token_ids, torch.cat(generated.logits).float())


def tiny_runner(
    model: PreTrainedModel, *, backend: AttentionBackend | None = None, **options: Any
) -> ModelRunner:
    """A runner over a small cache that is full of NaN."""
    defaults = {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_num_batched_tokens": MAX_ROWS,
    }
    config = EngineConfig(model="tiny", **defaults | options)
    runner, _ = build_runner(LoadedModel(model), config, backend=backend)
    runner.kv_cache.fill(float("nan"))
    return runner


def run_batched(
    runner: ModelRunner,
    prompts: Sequence[list[int]],
    continuations: Sequence[list[int]],
    *,
    seed: int = 0,
    rope_switch_tokens: int | None = None,
) -> list[torch.Tensor]:
    """Logits `[tokens, vocab]` of each request, all of them computed together.

    Requests arrive at random, wait at random, and advance by chunks of random size, in blocks that
    lie scattered. Each is fed with its continuation, whatever the logits say, so that all steps can
    be compared even when one goes wrong.
    """
    rng = random.Random(seed)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    requests = [
        Request(str(number), prompt, SamplingParams()) for number, prompt in enumerate(prompts)
    ]
    logits: list[list[torch.Tensor]] = [[] for _ in requests]
    waiting, running = list(requests), []
    while waiting or running:
        while waiting and rng.random() < 0.5:
            running.append(waiting.pop(0))
        step = _random_step(rng, running, free, rope_switch_tokens)
        if not step.scheduled:
            continue
        sampling = step.sampling
        for item, row in zip(sampling, runner.compute_logits(step), strict=True):
            number = int(item.request.request_id)
            item.request.token_ids.append(continuations[number][len(logits[number])])
            logits[number].append(row)
            if len(logits[number]) == len(continuations[number]):
                running.remove(item.request)
                free += item.request.block_ids
    return [torch.stack(rows) for rows in logits]


def _random_step(
    rng: random.Random,
    running: list[Request],
    free: list[int],
    rope_switch_tokens: int | None,
) -> SchedulerOutput:
    scheduled: list[ScheduledRequest] = []
    room = MAX_ROWS
    for request in rng.sample(running, len(running)):
        is_long = rope_switch_tokens is not None and request.num_tokens > rope_switch_tokens
        if is_long and request.rope_regime != "long":
            request.rope_regime, request.num_computed_tokens = "long", 0
        left = request.num_tokens - request.num_computed_tokens
        if not room or rng.random() < 0.2:
            continue
        count = rng.randint(1, min(left, room))
        scheduled.append(ScheduledRequest(request, request.num_computed_tokens, count))
        request.num_computed_tokens += count
        room -= count
        while len(request.block_ids) * BLOCK_SIZE < request.num_computed_tokens:
            request.block_ids.append(free.pop())
    return SchedulerOutput(tuple(scheduled), MAX_ROWS - room)
