"""Kernels compiled ahead for machines without a compiler, such as a container image.

`python -m tokenmill_engine.kernels.prebuilt --level x86-64-v3 --level x86-64-v4` compiles every
kernel for both levels of the x86-64 psABI, into the installed package or `--output`; a third level
is the last of them with AMX. At run time the best level that the processor has is taken.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: Where to look instead of in the package.
FOLDER_VARIABLE = "TOKENMILL_KERNELS_DIR"

_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

#: What /proc/cpuinfo calls the instruction sets of a level, the best level first.
LEVELS = {
    "x86-64-v4-amx": _V4 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "x86-64-v4": _V4,
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}

#: What a compiler calls them.
FLAGS = {
    "x86-64-v4-amx": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "x86-64-v4": ("-march=x86-64-v4",),
    "x86-64-v3": ("-march=x86-64-v3",),
}


def folder() -> Path:
    """Where prebuilt kernels are looked for."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).with_name("prebuilt"))


def levels_of(processor: str) -> list[str]:
    """The levels that a processor with these flags runs, the best first."""
    flags = set(processor.replace(":", " ").split())
    has_v3 = flags >= LEVELS["x86-64-v3"]
    return [level for level, needed in LEVELS.items() if has_v3 and flags >= needed]


def library_name(name: str, level: str, key: str) -> str:
    return f"{name}-{level}-{key}.so"


def main(arguments: Sequence[str] | None = None) -> int:
    # The other way round `build` looks a library up here.
    from .build import KernelUnavailable, compile_for

    parser = argparse.ArgumentParser(description="Compile the kernels for other processors.")
    parser.add_argument("--level", action="append", choices=sorted(LEVELS), required=True)
    parser.add_argument("--output", type=Path, default=folder(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    for level in options.level:
        for source in sorted(Path(__file__).parent.glob("*.cpp")):
            try:
                library = compile_for(source.stem, level, options.output)
            except KernelUnavailable as why:
                parser.exit(1, f"{why}\n")
            sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
