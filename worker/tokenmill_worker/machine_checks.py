"""What `tokenmill doctor` checks about a worker's machine: options, model, disk, memory, limits."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import psutil

from tokenmill.cli.doctor.finding import Finding
from tokenmill_engine.kernels.build import COMPILERS, is_available

from .errors import StartupError
from .model_store import DEFAULT_MODEL, default_model_folder, is_complete, prepare_model
from .settings import Settings, load_settings

#: Free space that a cache needs: the default model is made in 0.8 GB, kernels take a few MB.
LOW_DISK_BYTES: Final = 1 << 30
#: A worker takes some dozens; a client one or two for each partition.
FEW_FILES: Final = 1024
#: Beside the weights: the KV cache, torch itself and a step's activations.
MEMORY_FACTOR: Final = 1.3
_GIB: Final = 1 << 30
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def check_machine() -> Iterable[Finding]:
    """With the options that `tokenmill worker` would take from the environment."""
    try:
        settings = load_settings({})
    except StartupError as error:
        return [
            Finding(
                severity="error",
                check="options",
                problem="a worker would not start with these options",
                evidence=str(error),
                way_out="correct the variable TOKENMILL_… or the file of TOKENMILL_CONFIG; "
                "`tokenmill worker --print-config` shows where each value comes from",
            )
        ]
    checks = (check_model, check_memory, check_disk, check_kernels, check_files)
    return [finding for check in checks for finding in check(settings)]


def check_model(settings: Settings) -> Iterator[Finding]:
    if settings.model == DEFAULT_MODEL:
        folder = default_model_folder()
        if not is_complete(folder):
            yield Finding(
                severity="note",
                check="model",
                problem="the default model is not here yet: the first worker makes it (a minute)",
                evidence=str(folder),
                way_out="`python -m tokenmill_worker.model_store`, or name another with "
                "TOKENMILL_MODEL",
            )
        return
    try:
        folder = prepare_model(settings.model)
    except StartupError as error:
        yield Finding(
            severity="error",
            check="model",
            problem="there is no such model on this machine",
            evidence=f"TOKENMILL_MODEL={settings.model}: {error}",
            way_out="name an existing folder or a hub id with TOKENMILL_MODEL",
        )
        return
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        yield Finding(
            severity="error",
            check="model",
            problem="the model's folder holds no weights that may be read",
            evidence=f"no *.safetensors in {folder}",
            way_out="convert the model to safetensors; other formats are not read",
        )


def check_memory(settings: Settings) -> Iterator[Finding]:
    weights = sum(file.stat().st_size for file in _folder(settings).glob("*.safetensors"))
    total = _memory_bytes()
    if _has_gpu() or weights * MEMORY_FACTOR < total:
        return
    yield Finding(
        severity="error",
        check="machine-memory",
        problem="the model does not fit into this machine's memory",
        evidence=f"weights {weights / _GIB:.1f} GiB, memory {total / _GIB:.1f} GiB",
        way_out="take a smaller model or a larger machine (or raise the container's limit)",
    )


def check_disk(settings: Settings) -> Iterator[Finding]:
    folder = default_model_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < LOW_DISK_BYTES:
        yield Finding(
            severity="warning",
            check="disk",
            problem="the disk of the cache is nearly full: models and kernels cannot be made",
            evidence=f"{free / _GIB:.2f} GiB free at {folder}",
            way_out="free some space, or let XDG_CACHE_HOME name a folder on another disk",
        )


def check_kernels(settings: Settings) -> Iterator[Finding]:
    if settings.kernels == "torch" or _has_gpu() or is_available():
        return
    yield Finding(
        severity="error" if settings.kernels == "native" else "warning",
        check="kernels",
        problem="no kernels and no compiler: workers compute in plain torch, about half as fast",
        evidence=f"none of {', '.join(COMPILERS)} on PATH, and nothing prebuilt for this processor",
        way_out="install g++, or accept it with TOKENMILL_KERNELS=torch",
    )


def check_files(settings: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        yield Finding(
            severity="warning",
            check="open-files",
            problem="this process may open few files: connections fail under load",
            evidence=f"RLIMIT_NOFILE {soft} (hard limit {hard})",
            way_out=f"ulimit -n {4 * FEW_FILES}, LimitNOFILE= of systemd, or ulimits of compose",
        )


def _folder(settings: Settings) -> Path:
    is_default = settings.model == DEFAULT_MODEL
    return default_model_folder() if is_default else Path(settings.model).expanduser()


def _memory_bytes() -> int:
    """Of the machine, or of the container if that has a limit."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()
