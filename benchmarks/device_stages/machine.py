"""Stage 0: what the device is, and what it reaches at best."""

from __future__ import annotations

import importlib.metadata
import subprocess

import torch

from .context import Bench

#: Measured on an H200 before; a device far below is throttled, shared or another one.
H200_COPY_GBPS, H200_BF16_TFLOPS = 4000, 700


def check_machine(bench: Bench) -> None:
    packages = ("torch", "triton", "transformers", "numpy")
    bench.line("versions", **{name: _version(name) for name in packages})
    if bench.is_cuda:
        bench.line("device", name=torch.cuda.get_device_name(), smi=_nvidia_smi())
    copy_gbps, tflops = copy_rate(bench), _product_rate(bench)
    bench.line("ceilings", copy_gbps=copy_gbps, bf16_tflops=tflops)
    if bench.is_cuda and (copy_gbps < H200_COPY_GBPS or tflops < H200_BF16_TFLOPS):
        bench.line("below what an H200 reached before", marked=True)


def copy_rate(bench: Bench) -> float:
    """GB/s, read and written."""
    size = 1 << (20 if bench.tiny else 31)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / bench.median_ms(lambda: target.copy_(source)) / 1e6


def _product_rate(bench: Bench) -> float:
    side = 128 if bench.tiny else 8192
    left, right = (
        torch.randn(side, side, dtype=bench.dtype, device=bench.device) for _ in range(2)
    )
    return 2 * side**3 / bench.median_ms(lambda: left @ right) / 1e9


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _nvidia_smi() -> str:
    fields = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except FileNotFoundError:
        return "no nvidia-smi"
    return done.stdout.strip()
