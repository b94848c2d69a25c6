"""Stages 6 and 7: how long a step takes, with and without graphs, and where the time goes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from tokenmill_engine.outputs import ScheduledRequest, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampling_params import SamplingParams

from .context import Bench
from .serving import SHAPES, TINY, Serving, random_model

CONTEXT_TOKENS = 1024
#: Milliseconds at the memory or compute limit of an H200, by batch size (calculated).
FLOORS_MS = {
    "Qwen3-0.6B": {1: 0.30, 64: 2.05, 256: 7.47},
    "Llama-3.1-8B": {1: 3.52, 64: 5.51, 256: 12.9},
}


def time_small_model(bench: Bench) -> None:
    """Stage 6."""
    _time_model(bench, "Qwen3-0.6B")


def time_large_model(bench: Bench) -> None:
    """Stage 7."""
    _time_model(bench, "Llama-3.1-8B")


def _time_model(bench: Bench, name: str) -> None:
    timed = TimedModel.of(bench, name)
    for batch in timed.batches:
        if bench.is_out_of_time:
            bench.line("out of time", left_out=f"batch {batch}")
            return
        figures = timed.decode_figures(bench, batch)
        if not bench.tiny:
            figures["floor_ms"] = FLOORS_MS[name][batch]
            figures["of_floor"] = FLOORS_MS[name][batch] / float(str(figures["graph_ms"]))
        bench.line(f"{name} decode", batch=batch, context=timed.context_tokens, **figures)
    for tokens in timed.prompts:
        step = _step(timed.serving, 1, tokens, rows=tokens)
        milliseconds = bench.median_ms(lambda step=step: timed.serving.runner.compute_logits(step))
        bench.line(f"{name} prompt", tokens=tokens, tokens_per_s=tokens / milliseconds * 1e3)


@dataclass
class TimedModel:
    """A random model of a real shape with room for the batches that are timed."""

    serving: Serving
    batches: tuple[int, ...]
    context_tokens: int
    prompts: tuple[int, ...]

    @classmethod
    def of(cls, bench: Bench, name: str, *, fused: bool = True) -> TimedModel:
        """`name` of `SHAPES`; the tiny one if the check is tiny."""
        model_type, settings = SHAPES[name]
        batches, context, prompts = (1, 64, 256), CONTEXT_TOKENS, (1024, 8192)
        if bench.tiny:
            settings, batches, context, prompts = TINY, (2,), 20, (16,)
        model = random_model(bench, model_type, settings, bench.dtype)
        block = 16 if bench.tiny else 32
        blocks = max(batches) * (context // block + 1) + 1
        serving = Serving.of(
            bench,
            model,
            fused=fused,
            max_num_seqs=max(batches),
            max_num_batched_tokens=max(prompts),
            max_model_len=max(prompts) + 1,
            num_gpu_blocks_override=max(blocks, max(prompts) // block + 2),
            block_size=block,
            skip_self_test=True,
        )
        serving.runner.kv_cache.fill(0.0)
        return cls(serving, batches, context, prompts)

    def decode_figures(self, bench: Bench, batch: int) -> dict[str, object]:
        """Milliseconds of a step without and with a graph; on a GPU also what it launches."""
        serving, runner = self.serving, self.serving.runner
        step, sampler = _step(serving, batch, self.context_tokens), serving.new_sampler()
        graphs, runner.graphs = runner.graphs, None
        plain_ms = bench.median_ms(lambda: runner.execute(step, sampler))
        runner.graphs = graphs
        reserved = torch.cuda.memory_reserved() if bench.is_cuda else 0
        began_s = time.monotonic()
        for _ in range(2):  # the second is recorded
            runner.execute(step, sampler)
        capture_s = time.monotonic() - began_s
        graph_ms = bench.median_ms(lambda: runner.execute(step, sampler), repeats=100)
        figures: dict[str, object] = {"plain_ms": plain_ms, "graph_ms": graph_ms}
        if bench.is_cuda:
            figures["capture_mib"] = (torch.cuda.memory_reserved() - reserved) >> 20
            figures |= _kernels(lambda: runner.execute(step, sampler))
        return {**figures, "capture_s": capture_s}


def _step(serving: Serving, batch: int, context: int, rows: int = 1) -> SchedulerOutput:
    """Each request in blocks of its own, whose content does not matter for the time."""
    block = serving.facts.block_size
    per_request = -(-context // block)
    scheduled = []
    for number in range(batch):
        params = SamplingParams(temperature=0.0 if number % 2 else 1.0, top_p=0.95)
        request = Request(str(number), [5] * context, params, seed=number)
        first = number * per_request
        request.block_ids = list(range(first, first + per_request))
        scheduled.append(ScheduledRequest(request, context - rows, rows))
    return SchedulerOutput(tuple(scheduled), batch * rows)


def _kernels(work: object) -> dict[str, object]:
    """How many kernels a step launches, and for how long the device computes."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy_us = sum(event.device_time_total for event in events)
    return {"kernels": len(events), "busy_ms": busy_us / 1e3}
