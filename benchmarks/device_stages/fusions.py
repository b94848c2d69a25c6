"""Fused modules on the device: do they compute the same, what do they launch, what do they save."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from tokenmill_engine.attention import IMPLEMENTATION
from tokenmill_engine.fusion import fuse_modules
from tokenmill_engine.probe import probe, switch_attention
from tokenmill_engine.triton_attention import TritonPagedAttention
from tokenmill_engine.triton_fusions import TritonOperations

from .context import Bench
from .serving import SHAPES, TINY, Serving, random_model, widen
from .steps import TimedModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPT_TOKENS = 12


def check_fusions(bench: Bench) -> None:
    """Part of stage 4: everything is fused, and no further from float64 than what it replaces.

    In bfloat16 the interpreter cuts numbers off where a GPU rounds them, so a tiny check on a CPU
    leaves that type out.
    """
    layers = 1 if bench.tiny else 4
    sizes = {} if bench.tiny else {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    for name in ("llama", "qwen3"):
        for dtype in DTYPES if bench.is_cuda else (torch.float32, torch.float16):
            settings = {**TINY, **sizes, "num_hidden_layers": layers}
            model = random_model(bench, name, settings, dtype)
            widen(model)
            exact, own = (_logits(which) for which in (copy.deepcopy(model).double(), model))
            counts = _fuse(model)
            label = f"{name} fused, {str(dtype).removeprefix('torch.')}"
            bench.require(counts["layers"] == layers, f"{label}: only {counts}")
            serving = Serving.of(
                bench, model, fused=False, num_gpu_blocks_override=8, max_model_len=64,
                max_num_batched_tokens=64, max_num_seqs=2, enforce_eager=True, skip_self_test=True,
            )  # fmt: skip
            fused = serving.prompt_logits(_prompt())
            errors = [
                float((got.double() - exact).square().mean().sqrt() / exact.std())
                for got in (fused, own)
            ]
            bench.require(errors[0] < 1.5 * errors[1] + 1e-6, f"{label}: errors {errors}")
            bench.line(label, error=errors[0], unfused_error=errors[1], **counts)


def time_fusions(bench: Bench) -> None:
    """Stage 9: kernels and milliseconds of a decode step with and without fused modules."""
    name = "Qwen3-0.6B"
    num_layers = int(str((TINY if bench.tiny else SHAPES[name][1])["num_hidden_layers"]))
    found: dict[bool, dict[int, dict[str, object]]] = {}
    for fused in (True, False):
        timed = TimedModel.of(bench, name, fused=fused)
        found[fused] = {}
        for batch in timed.batches:
            if bench.is_out_of_time:
                bench.line("out of time", left_out=f"batch {batch}, fused {fused}")
                break
            found[fused][batch] = timed.decode_figures(bench, batch)
    for batch, without in found[False].items():
        row: dict[str, object] = {}
        for label, figures in (("fused", found[True][batch]), ("unfused", without)):
            if "kernels" in figures:
                # Includes the few kernels of a step that belong to no layer.
                row[f"{label}_kernels_per_layer"] = int(str(figures["kernels"])) / num_layers
            row[f"{label}_plain_ms"] = figures["plain_ms"]
            row[f"{label}_graph_ms"] = figures["graph_ms"]
        bench.line(f"{name} decode", batch=batch, **row)


def _fuse(model: PreTrainedModel) -> dict[str, int]:
    specs = probe(model).specs
    switch_attention(model, IMPLEMENTATION)
    backend = TritonPagedAttention(specs.values(), model.device)
    max_model_len = model.config.max_position_embeddings
    return fuse_modules(model, backend, specs, TritonOperations(), max_model_len=max_model_len)


def _prompt() -> list[int]:
    return [3 + 7 * number for number in range(PROMPT_TOKENS)]


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> torch.Tensor:
    """Of the last row, by the model's own modules and attention."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([_prompt()], device=model.device)
    logits: torch.Tensor = model(ids, use_cache=False).logits[0, -1]
    return logits
