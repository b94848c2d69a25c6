"""The kernels around the products, compiled for GPUs without having one: none spills registers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_triton_aot import Build, compile_all
from tokenmill_engine.fused_operations import ACTIVATIONS, HeadPreparation, Norm
from tokenmill_engine.triton_fusions import (
    MAX_NORM_SIZE,
    gated_constants,
    norm_constants,
    norm_warps,
)
from tokenmill_engine.triton_tiles import CallShape
from tokenmill_engine.triton_writes import prepare_constants

MODULE = "tokenmill_engine.kernels.triton_elementwise"
CAPABILITIES = (80, 90)
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Widths of layers and of heads, odd ones and the widest among them.
NORM_SIZES = (64, 576, 2880, 8192, MAX_NORM_SIZE)
#: Query heads, KV heads, dimensions of K and V, and how many of them are rotated.
HEADS = {
    "Qwen 3": (16, 8, 128, 128, 128),
    "Llama 3": (32, 8, 128, 128, 128),
    "GPT-NeoX, a quarter rotated": (32, 32, 80, 80, 20),
    "SmolLM2": (9, 3, 64, 64, 64),
    "Gemma 4": (8, 1, 512, 512, 512),
    "nothing rotated": (40, 8, 192, 128, 0),
}


def norm_builds(dtype: torch.dtype) -> Iterator[Build]:
    sizes = product(NORM_SIZES, (False, True), (False, True))
    for size, rounds_first, has_residual in sizes:
        norm = Norm(torch.ones(1), 1e-6, rounds_first)
        constants = norm_constants(size, norm, has_residual=has_residual)
        yield from builds("rms_norm", dtype, constants, norm_warps(size))


def head_builds(dtype: torch.dtype) -> Iterator[Build]:
    norm = Norm(torch.ones(1), 1e-6, True)
    for (heads, kv_heads, key_dim, value_dim, rotary), has_norms in product(
        HEADS.values(), (False, True)
    ):
        table = torch.empty(1, rotary)
        norms = (norm, norm) if has_norms else (None, None)
        shape = CallShape(heads, kv_heads, key_dim, value_dim, dtype)
        constants = prepare_constants(shape, HeadPreparation(table, table, *norms))
        yield from builds("prepare_and_write", dtype, constants)


def gate_builds(dtype: torch.dtype) -> Iterator[Build]:
    for size, gate in product((96, 3072, 14_336), ACTIVATIONS):
        yield from builds("gated", dtype, gated_constants(size, gate))


def builds(
    kernel: str, dtype: torch.dtype, constants: dict[str, int], num_warps: int = 4
) -> Iterator[Build]:
    for capability in CAPABILITIES:
        yield Build(MODULE, kernel, capability, TYPES[dtype], constants, num_warps)


def test_a_layer_of_llama_compiles_without_spills(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    chosen = [
        next(build for build in some if build.capability == 90)
        for some in (norm_builds(dtype), head_builds(dtype), gate_builds(dtype))
    ]
    check(chosen, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [norm_builds, head_builds, gate_builds])
def test_every_build_compiles_without_spills(
    kind: object, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert callable(kind)
    check(list(kind(dtype)), tmp_path)


def check(wanted: list[Build], cache: Path) -> None:
    for build, usage in zip(wanted, compile_all(wanted, cache), strict=True):
        assert usage.stack_bytes == 0, (build, usage)
        assert usage.registers <= 128, (build, usage)
        assert usage.shared_bytes <= 8 * 1024, (build, usage)
