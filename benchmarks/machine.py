"""The circumstances of a measurement, recorded beside its figures."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

RECORDED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe(repository: Path) -> dict[str, object]:
    """Machine, system, date and the commit under test."""
    cpu = _cpu_information()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": [flag for flag in RECORDED_FLAGS if flag in cpu.get("flags", "").split()],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "omp": {name: value for name, value in os.environ.items() if name.startswith("OMP_")},
        "commit": _git(repository, "rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git(repository, "status", "--porcelain", "-uno")),
    }


def _cpu_information() -> Mapping[str, str]:
    information: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        information.setdefault(name.strip(), value.strip())
    return information


def _git(repository: Path, *arguments: str) -> str:
    answer = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()


def busy_cores(window_s: float = 1.0) -> float:
    """How many cores the whole machine keeps busy now: what a measurement would share with."""
    before = _cpu_jiffies()
    time.sleep(window_s)
    after = _cpu_jiffies()
    spent = [b - a for a, b in zip(before, after, strict=True)]
    user, nice, system, _idle, _iowait, irq, softirq, steal = spent[:8]
    busy = user + nice + system + irq + softirq + steal
    return busy / max(1, sum(spent[:8])) * (os.cpu_count() or 1)


def _cpu_jiffies() -> Sequence[int]:
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    return [int(field) for field in first_line.split()[1:]]
