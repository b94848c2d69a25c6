"""The Triton kernels compiled for GPUs without having one: no spills, and tensor cores in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_triton_aot import Build, Usage, compile_all
from tokenmill_engine.attention import AttentionRule
from tokenmill_engine.triton_tiles import (
    CallShape,
    attend_constants,
    decode_tile,
    merge_constants,
    prompt_tile,
    write_constants,
)
from tokenmill_engine.work_list import SPLIT_TOKENS

MODULE = "tokenmill_engine.kernels.triton_paged_attention"
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Of a program, on the smallest processor that the kernel is for (sm_86, sm_89, sm_120).
SHARED_BYTES = 99 * 1024
CAPABILITIES = (80, 90)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = AttentionRule(1.0)
WINDOW = AttentionRule(1.0, window=4096)
CHUNK = AttentionRule(1.0, chunk=8192)
CAPPED = AttentionRule(1.0, window=4096, softcap=50.0)
SINKS = AttentionRule(1.0, window=128, sinks=torch.zeros(1))
FULL_SINKS = AttentionRule(1.0, sinks=torch.zeros(1))
#: As models have them, and the widest and oddest that the tiles are for.
CALLS = {
    "Llama 3": (CallShape(32, 8, 128, 128, BF16), PLAIN),
    "Llama 4": (CallShape(40, 8, 128, 128, BF16), CHUNK),
    "Qwen 2, 7 to 1": (CallShape(28, 4, 128, 128, F16), WINDOW),
    "Gemma 2": (CallShape(8, 4, 256, 256, BF16), CAPPED),
    "Gemma 4": (CallShape(8, 1, 512, 512, BF16), PLAIN),
    "GPT-OSS": (CallShape(64, 8, 64, 64, BF16), SINKS),
    "GPT-OSS in float16": (CallShape(64, 8, 64, 64, F16), SINKS),
    "GPT-OSS without a window": (CallShape(64, 8, 64, 64, BF16), FULL_SINKS),
    "Phi 3": (CallShape(32, 32, 96, 96, BF16), WINDOW),
    "DeepSeek V3": (CallShape(128, 128, 192, 128, BF16), PLAIN),
    "Falcon, 71 to 1": (CallShape(71, 1, 64, 64, BF16), PLAIN),
    "SmolLM2 in float32": (CallShape(9, 3, 64, 64, F32), PLAIN),
    "Llama 3 in float32": (CallShape(32, 8, 128, 128, F32), CAPPED),
    "Gemma 2 in float32": (CallShape(8, 4, 256, 256, F32), CAPPED),
    "Gemma 4 in float32": (CallShape(8, 1, 512, 512, F32), PLAIN),
}


def attend_builds(shape: CallShape, rule: AttentionRule) -> Iterator[Build]:
    for tile, split_tokens in ((decode_tile(shape), SPLIT_TOKENS), (prompt_tile(shape), 0)):
        constants = attend_constants(shape, rule, tile, block_size=32, split_tokens=split_tokens)
        constants["UPCAST"] = False
        for capability in CAPABILITIES:
            yield Build(
                MODULE,
                "attend",
                capability,
                TYPES[shape.dtype],
                constants,
                tile.num_warps,
                tile.num_stages,
            )


def check(build: Build, usage: Usage) -> None:
    assert usage.stack_bytes == 0, (build, usage)
    assert usage.shared_bytes <= SHARED_BYTES, (build, usage)
    if build.kernel == "attend" and build.dtype != "fp32":
        assert usage.tensor_core_products > 0, (build, usage)
        assert usage.async_copies > 0, (build, usage)


def test_decode_on_hopper_compiles_without_spills(tmp_path: Path) -> None:
    (build,) = (
        build
        for build in attend_builds(*CALLS["Llama 3"])
        if build.capability == 90 and build.constants["SPLIT"]
    )

    (usage,) = compile_all([build], tmp_path)

    check(build, usage)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CALLS)
def test_every_tile_compiles_without_spills(name: str, tmp_path: Path) -> None:
    builds = list(attend_builds(*CALLS[name]))

    for build, usage in zip(builds, compile_all(builds, tmp_path), strict=True):
        check(build, usage)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_small_kernels_compile_without_spills(tmp_path: Path) -> None:
    builds = []
    for name in ("Gemma 4", "GPT-OSS", "DeepSeek V3", "Phi 3"):
        shape, rule = CALLS[name]
        kernels = (("merge", merge_constants(shape, rule)), ("write_kv", write_constants(shape)))
        builds += [
            Build(MODULE, kernel, capability, TYPES[shape.dtype], constants)
            for kernel, constants in kernels
            for capability in CAPABILITIES
        ]

    for build, usage in zip(builds, compile_all(builds, tmp_path), strict=True):
        check(build, usage)
