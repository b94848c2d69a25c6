"""Compiling a kernel for this very processor, once, and loading it.

The sources need neither torch's headers nor Python's: a plain C interface compiles in seconds and
survives upgrades of both. The result is cached under a name that tells the source, the compiler
and the processor apart, so a cache on a shared disk serves different machines.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi",
    # Each product and sum is one rounding, in every loop: GCC's tuning for some processors would
    # split them in some, and a row's result would depend on how many rows it is computed with.
    "-ffp-contract=fast", "--param=avoid-fma-max-bits=0",
)  # fmt: skip
#: A compiler that takes longer hangs.
COMPILE_TIMEOUT_S = 300


class KernelUnavailable(Exception):
    """The text says why in one line, and what to install."""


@cache
def load_kernel(name: str) -> ctypes.CDLL:
    """The library made from `<name>.cpp` beside this module.

    Raises KernelUnavailable: there is no compiler, or it refused the source.
    """
    source = Path(__file__).with_name(f"{name}.cpp")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelUnavailable(f"no C++ compiler ({', '.join(COMPILERS)}): install g++")
    library = _cache_folder() / f"{name}-{_key(source, compiler)}.so"
    if not library.exists():
        _compile(source, compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"the compiled {name} cannot be loaded") from error


def _cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "tokenmill" / "kernels"


def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    headers = (header.read_bytes() for header in sorted(source.parent.glob("*.h")))
    parts = (
        source.read_bytes(), *headers, version, " ".join(FLAGS).encode(), _processor().encode(),
    )  # fmt: skip
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """The instruction sets that `-march=native` stands for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(source: Path, compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own first: several workers may start at once.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, *FLAGS, str(source), "-o", str(made)]
            result = subprocess.run(
                command, capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S
            )
            if result.returncode:
                raise KernelUnavailable(f"{compiler} cannot compile {source.name} on this machine")
            made.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(
            f"{source.name} cannot be compiled into {library.parent}: {type(error).__name__}"
        ) from error
