"""The sampling kernel compiled for GPUs without having one: it must not spill its sums."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_triton_aot import Build, compile_all
from tokenmill_engine.device_sampling import _BLOCK, _NUM_WARPS

MODULE = "tokenmill_engine.kernels.triton_sample"


@pytest.mark.slow
def test_the_kernel_compiles_and_spills_nothing(tmp_path: Path) -> None:
    builds = [
        Build(MODULE, "sample", capability, "fp32", {"BLOCK": _BLOCK}, num_warps=_NUM_WARPS)
        for capability in (80, 90)
    ]
    usages = compile_all(builds, tmp_path)
    assert [usage.stack_bytes for usage in usages] == [0, 0]
    assert all(usage.shared_bytes <= 99 * 1024 for usage in usages)
