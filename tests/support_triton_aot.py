"""Compiles the Triton kernels for NVIDIA processors on a machine without any.

`python support_triton_aot.py` reads a list of builds as JSON from stdin and writes for each a line
with the registers, stack and shared memory that it takes. In a process of its own, without the
interpreter: which of the two a kernel is for is decided when its module is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Build:
    """One kernel with its constants; `dtype` as Triton writes it (fp32, bf16, fp16)."""

    module: str
    kernel: str
    capability: int  # 90 for sm_90
    dtype: str
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Usage:
    """Of one build; a stack means that registers were spilled to memory."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    async_copies: int  # cp.async in the PTX: the loads of the loop are pipelined
    tensor_core_products: int


def compile_all(builds: list[Build], cache: Path) -> list[Usage]:
    """One process for all of them."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "engine"), str(ROOT / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps([asdict(build) for build in builds]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Usage(**json.loads(line)) for line in done.stdout.splitlines()]


#: Parameters of the kernels that are neither constants nor int32 (pointers, counts and strides).
FLOATS = {"scaling", "softcap", "epsilon"}
FLOAT32_POINTERS = {"part_values", "part_stats", "logits", "weight", "query_norm", "key_norm"}
TENSORS = {"output", "query", "key", "value", "key_cache", "value_cache", "sinks"}
TENSORS |= {"normed", "total", "rows", "residual", "pairs", "prepared", "cos", "sin"}
INT64_POINTERS = {"slot_blocks", "slot_offsets", "settings", "token_ids"}
INT32_POINTERS = {"sequences", "block_ids", "items", "merges"}


def type_of(parameter: str, build: Build) -> str:
    if parameter in build.constants:
        return "constexpr"
    if parameter in FLOATS:
        return "fp32"
    if parameter in FLOAT32_POINTERS:
        return "*fp32"
    if parameter in TENSORS:
        return "*" + build.dtype
    if parameter in INT64_POINTERS:
        return "*i64"
    return "*i32" if parameter in INT32_POINTERS else "i32"


def compile_one(build: Build) -> Usage:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(build.module), build.kernel)
    names = kernel.arg_names
    types = {name: type_of(name, build) for name in names}
    # Torch aligns allocations, and the strides of real models are multiples of 16.
    aligned = [i for i, name in enumerate(names) if types[name] not in {"constexpr", "fp32"}]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    target = GPUTarget("cuda", build.capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    registers, stack = resources(compiled.asm["cubin"], Path(triton.__file__).parent)
    return Usage(
        registers=registers,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        async_copies=ptx.count("cp.async.cg") + ptx.count("cp.async.ca"),
        tensor_core_products=ptx.count("mma.sync") + ptx.count("wgmma.mma_async"),
    )


def resources(cubin: bytes, triton_folder: Path) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the tool in Triton's own wheel tells them."""
    tool = triton_folder / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
    assert found, told.stdout
    return int(found[1]), int(found[2])


def main() -> None:
    for fields in json.load(sys.stdin):
        sys.stdout.write(json.dumps(asdict(compile_one(Build(**fields)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
