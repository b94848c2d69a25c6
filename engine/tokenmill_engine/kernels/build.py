"""Compiling a kernel for this very processor, once, and loading it.

The sources need neither torch's headers nor Python's: a plain C interface compiles in seconds and
survives upgrades of both. The result is cached under a name that tells the source, the compiler
and the processor apart, so a cache on a shared disk serves different machines.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from . import prebuilt

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi",
    # Each product and sum is one rounding, in every loop: GCC's tuning for some processors would
    # split them in some, and a row's result would depend on how many rows it is computed with.
    "-ffp-contract=fast", "--param=avoid-fma-max-bits=0",
)  # fmt: skip
#: What single sources need beside; the last word counts.
FLAGS_OF = {
    # Each product and each sum is rounded, as numpy does it: see `shares.py`.
    "sample": ("-ffp-contract=off",),
}
#: A compiler that takes longer hangs.
COMPILE_TIMEOUT_S = 300


#: Libraries that `build_ahead` makes, by name of the kernel.
_under_way: dict[str, Future[Path]] = {}


class KernelUnavailable(Exception):
    """The text says why in one line, and what to install."""


def build_ahead() -> None:
    """Starts compiling what is not compiled yet, beside whatever comes next; returns at once.

    A process that starts has one core at work, on imports. The others compile, and `load_kernel`
    waits for its library only if that is still under way. Nothing is loaded before it is asked
    for: OpenMP must come from torch.
    """
    # Linear layers last: the others are asked for first, and kernels of torch may do instead.
    names = sorted(
        (source.stem for source in _sources()), key=lambda name: (name == "linear", name)
    )
    names = [name for name in names if name not in _under_way]
    _under_way.update((name, Future()) for name in names)
    num_threads = min(len(names), max(1, (os.cpu_count() or 1) - 1))
    for number in range(num_threads):
        # A daemon: a worker that is told to stop does not wait for a compiler.
        share = [(name, _under_way[name]) for name in names[number::num_threads]]
        threading.Thread(target=_build_all, args=(share,), name="kernels", daemon=True).start()


def _build_all(kernels: Iterable[tuple[str, Future[Path]]]) -> None:
    for name, future in kernels:
        if not future.set_running_or_notify_cancel():  # whoever needs it did not wait for its turn
            continue
        try:
            future.set_result(_made_here(_source(name)))
        except Exception as error:  # noqa: BLE001 - raised again by load_kernel()
            future.set_exception(error)


@cache
def load_kernel(name: str) -> ctypes.CDLL:
    """The library made from `<name>.cpp` beside this module.

    Where that cannot be compiled, one that was prebuilt for a processor like this.

    Raises KernelUnavailable: there is no compiler, or it refused the source, and none is prebuilt.
    """
    source = _source(name)
    try:
        ahead = _under_way.get(name)
        library = _made_here(source) if ahead is None or ahead.cancel() else ahead.result()
    except KernelUnavailable:
        found = _prebuilt(source)
        if found is None:
            raise
        library = found
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"the compiled {name} cannot be loaded") from error


def is_available() -> bool:
    """Whether there is a compiler, or all are prebuilt for this processor. Makes nothing."""
    if any(map(shutil.which, COMPILERS)):
        return True
    return all(map(_prebuilt, _sources()))


def compile_for(name: str, level: str, folder: Path) -> Path:
    """Compile a kernel for any processor of `level` and return the library's path.

    Raises KernelUnavailable.
    """
    source = _source(name)
    library = folder / prebuilt.library_name(name, level, _source_key(source))
    _compile(source, _compiler(), library, processor=prebuilt.FLAGS[level])
    return library


def _sources() -> Iterator[Path]:
    return Path(__file__).parent.glob("*.cpp")


def _source(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.cpp")


def _flags(source: Path) -> tuple[str, ...]:
    return (*FLAGS, *FLAGS_OF.get(source.stem, ()))


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelUnavailable(f"no C++ compiler ({', '.join(COMPILERS)}): install g++")
    return compiler


def _made_here(source: Path) -> Path:
    compiler = _compiler()
    library = _cache_folder() / f"{source.stem}-{_key(source, compiler)}.so"
    if not library.exists():
        _compile(source, compiler, library)
    return library


def _prebuilt(source: Path) -> Path | None:
    for level in prebuilt.levels_of(_processor()):
        name = prebuilt.library_name(source.stem, level, _source_key(source))
        library = prebuilt.folder() / name
        if library.exists():
            logger.info("kernel %s: prebuilt for %s", source.stem, level)
            return library
    return None


def _cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "tokenmill" / "kernels"


def _key(source: Path, compiler: str) -> str:
    """Of a library for this very processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return _hash(_source_key(source).encode(), version, _processor().encode())


def _source_key(source: Path) -> str:
    headers = (header.read_bytes() for header in sorted(source.parent.glob("*.h")))
    return _hash(source.read_bytes(), *headers, " ".join(_flags(source)).encode())


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """The instruction sets that `-march=native` stands for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(
    source: Path, compiler: str, library: Path, *, processor: Sequence[str] = ("-march=native",)
) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own first: several workers may start at once.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, *_flags(source), *processor, str(source), "-o", str(made)]
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
