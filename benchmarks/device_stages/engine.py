"""Stages 2, 4 and 8: graphs against plain steps, models against `generate`, and a workload."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from transformers import PreTrainedModel

from tokenmill_engine.outputs import ScheduledRequest, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampling_params import SamplingParams

from .context import Bench
from .fusions import check_fusions
from .serving import SHAPES, TINY, Serving, random_model, widen

#: Calculated for an H200: 256 requests, prompts and answers of 100 to 1,024 tokens.
FLOOR_TOKENS_PER_S = 35_200
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 24}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 16},
    "gpt_oss": {**WINDOW, **LOCAL_EXPERTS},
    "qwen3_moe": EXPERTS,
}


def check_graphs(bench: Bench) -> None:
    """Stage 2: random mixes through one set of graphs, and no hidden waiting for the device."""
    model = random_model(bench, "llama", _settings(bench), bench.dtype)
    serving = Serving.of(bench, model, max_num_seqs=8, num_gpu_blocks_override=65, **_small(bench))
    runner, graphs = serving.runner, serving.graphs
    bench.require(graphs is not None, "the model gets graphs")
    runner.kv_cache.fill(0.0)
    rng, graphed_steps, worst = random.Random(0), 0, 0.0
    rounds = 4 if bench.tiny else 50
    for number in range(rounds):
        step = _random_step(rng, serving)
        plain = runner.compute_logits(step).clone()
        with _no_waiting(bench, number > 20):
            graphed = graphs.run(step)
        if graphed is not None:
            graphed_steps += 1
            worst = max(worst, float((graphed.logits - plain).abs().max() / plain.abs().max()))
    bench.require(worst < 2e-2, f"logits of graphs differ from plain steps by {worst:.2g}")
    bench.line(
        "graphs", steps=rounds, graphed=graphed_steps, recorded=graphs.num_graphs, worst=worst
    )


def check_engine(bench: Bench) -> None:
    """Stage 4: greedy tokens as `generate` has them, with and without graphs, with steps one
    ahead, and preempted.

    Modules are fused as in any engine; `check_fusions` looks at them alone first.
    """
    check_fusions(bench)
    lengths, new_tokens = ((7, 8), 6) if bench.tiny else ((5, 37, 61, 90, 3, 150), 24)
    # So few that all requests start and not all can grow.
    block, few, many = (4, 6, 12) if bench.tiny else (16, 18, 64)
    modes = {
        "graphs": {"num_gpu_blocks_override": many},
        "graphs, ahead": {"num_gpu_blocks_override": many},
        "plain": {"num_gpu_blocks_override": many, "enforce_eager": True},
        "plain, ahead": {"num_gpu_blocks_override": many, "enforce_eager": True},
        "preempted": {"num_gpu_blocks_override": few if bench.is_cuda else few + 1},
        "preempted, ahead": {"num_gpu_blocks_override": few if bench.is_cuda else few + 1},
    }
    sizes = {"block_size": block, "max_model_len": max(lengths) + new_tokens, "max_num_seqs": 8}
    for name, (mode, options) in product(
        ("llama", "gpt_oss") if bench.tiny else FAMILIES, modes.items()
    ):
        if bench.is_out_of_time:
            bench.line("out of time", left_out=f"{name}, {mode}")
            return
        settings = _settings(bench) | FAMILIES[name]
        model = random_model(bench, name, settings, torch.float32)
        widen(model)
        prompts = _prompts(lengths, int(str(settings["vocab_size"])))
        wanted = [_by_generate(model, prompt, new_tokens) for prompt in prompts]
        serving = Serving.of(bench, model, **sizes, **options)
        requests = [_greedy(i, prompt, new_tokens) for i, prompt in enumerate(prompts)]
        preempted = serving.generate(requests, ahead="ahead" in mode)
        same = [r.token_ids[len(p) :] for r, p in zip(requests, prompts, strict=True)]
        bench.require(same == wanted, f"{name}, {mode}: other tokens than generate")
        bench.require((preempted > 0) == ("preempted" in mode), f"{name}, {mode}: {preempted}")
        bench.line(f"{name}, {mode}", equal=True, preempted=preempted)


def run_workload(bench: Bench) -> None:
    """Stage 8: many requests at once, all of them decoded to their end."""
    name = "Qwen3-0.6B"
    model_type, settings = ("qwen3", TINY) if bench.tiny else SHAPES[name]
    model = random_model(bench, model_type, settings, bench.dtype)
    count, low, high = (3, 4, 8) if bench.tiny else (256, 100, 1024)
    options = {"num_gpu_blocks_override": 9} if bench.tiny else {}
    serving = Serving.of(
        bench, model, max_num_seqs=count, max_model_len=2048 // (64 if bench.tiny else 1), **options
    )
    rng = random.Random(0)
    lengths = [rng.randint(low, high) for _ in range(count)]
    prompts = _prompts(lengths, int(str(settings["vocab_size"])))
    for label in ("graphs recorded on the way", "graphs there", "one ahead"):
        if bench.is_out_of_time:
            bench.line("out of time", left_out=label)
            return
        requests = [_greedy(i, prompt, rng.randint(low, high)) for i, prompt in enumerate(prompts)]
        began_s = time.monotonic()
        serving.generate(requests, ahead=label == "one ahead")
        seconds = time.monotonic() - began_s
        tokens = sum(request.num_output_tokens for request in requests)
        figures = {"tokens_per_s": tokens / seconds, "seconds": seconds}
        if not bench.tiny:
            figures["of_floor"] = tokens / seconds / FLOOR_TOKENS_PER_S
        bench.line(f"{count} requests, {label}", **figures)


def _settings(bench: Bench) -> dict[str, object]:
    return (
        TINY if bench.tiny else {**TINY, "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 64}
    )


def _small(bench: Bench) -> dict[str, object]:
    return (
        {"max_model_len": 64, "max_num_batched_tokens": 24}
        if bench.tiny
        else {"max_model_len": 256}
    )


def _prompts(lengths: tuple[int, ...] | list[int], vocab: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def _greedy(number: int, prompt: list[int], new_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    return Request(str(number), prompt, params)


@torch.inference_mode()
def _by_generate(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt], device=model.device)
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return done[0, len(prompt) :].tolist()


def _random_step(rng: random.Random, serving: Serving) -> SchedulerOutput:
    """Some decodes and sometimes a prompt chunk, over blocks that are not shared."""
    facts = serving.facts
    free = list(range(facts.num_blocks))
    rng.shuffle(free)
    scheduled = []
    for number in range(rng.randint(1, 4)):
        is_chunk = number == 3
        length = rng.randint(8, 16 if serving.facts.max_model_len < 100 else 200)
        request = Request(str(number), [7] * length, SamplingParams())
        blocks = -(-length // facts.block_size)
        request.block_ids, free = free[:blocks], free[blocks:]
        rows = rng.randint(2, 8) if is_chunk else 1
        scheduled.append(ScheduledRequest(request, length - rows, rows))
    return SchedulerOutput(tuple(scheduled), sum(item.num_tokens for item in scheduled))


@contextmanager
def _no_waiting(bench: Bench, is_warm: bool) -> Iterator[None]:
    """Torch raises if something waits for the device. Captures may: they come first."""
    if not (bench.is_cuda and is_warm):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
