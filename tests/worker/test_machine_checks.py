"""What the doctor finds about a worker's machine, with one fault at a time."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill_engine.kernels import build, prebuilt
from tokenmill_worker import machine_checks
from tokenmill_worker.machine_checks import check_machine

MODEL_BYTES = 1000


@pytest.fixture
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a small model, a compiler, and room."""
    for name in os.environ:
        if name.startswith(("TOKENMILL_", "REDIS_")):
            monkeypatch.delenv(name)
    model, programs = tmp_path / "model", tmp_path / "bin"
    model.mkdir()
    programs.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x" * MODEL_BYTES)
    (programs / "g++").write_text("#!/bin/sh\n")
    (programs / "g++").chmod(0o755)
    monkeypatch.setenv("TOKENMILL_MODEL", str(model))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("TOKENMILL_KERNELS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(machine_checks, "LOW_DISK_BYTES", 0)
    monkeypatch.setattr(machine_checks, "_has_gpu", lambda: False)
    return monkeypatch


def found() -> list[tuple[str, str]]:
    return [(finding.check, finding.severity) for finding in check_machine()]


def test_a_healthy_machine_has_no_findings(healthy: pytest.MonkeyPatch) -> None:
    assert found() == []


def no_model(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("TOKENMILL_MODEL", str(folder / "no such model"))


def unprepared_model(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.delenv("TOKENMILL_MODEL")


def pickled_model(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def misspelt_option(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("TOKENMILL_LEASE_MSS", "1000")


def no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "bin" / "g++").unlink()


def native_without_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("TOKENMILL_KERNELS", "native")
    no_compiler(patch, folder)


def little_memory(patch: pytest.MonkeyPatch, folder: Path) -> None:
    limit = folder / "memory.max"
    limit.write_text(f"{MODEL_BYTES}\n")
    patch.setattr(machine_checks, "CGROUP_LIMIT", limit)


def full_disk(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(machine_checks, "LOW_DISK_BYTES", shutil.disk_usage(folder).free + (1 << 40))


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (no_model, ("model", "error")),
        (unprepared_model, ("model", "note")),
        (pickled_model, ("model", "error")),
        (misspelt_option, ("options", "error")),
        (no_compiler, ("kernels", "warning")),
        (native_without_compiler, ("kernels", "error")),
        (little_memory, ("machine-memory", "error")),
        (full_disk, ("disk", "warning")),
    ],
)
def test_a_planted_fault_is_found_and_nothing_else(
    healthy: pytest.MonkeyPatch,
    tmp_path: Path,
    plant: Callable[[pytest.MonkeyPatch, Path], None],
    expected: tuple[str, str],
) -> None:
    plant(healthy, tmp_path)
    assert found() == [expected]


def test_prebuilt_kernels_do_without_a_compiler(
    healthy: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    levels = prebuilt.levels_of(build._processor())
    if not levels:
        pytest.skip("nothing can be prebuilt for this processor")
    no_compiler(healthy, tmp_path)
    (tmp_path / "kernels").mkdir()
    for source in Path(build.__file__).parent.glob("*.cpp"):
        name = prebuilt.library_name(source.stem, levels[-1], build._source_key(source))
        (tmp_path / "kernels" / name).touch()
    assert found() == []


def test_few_open_files(healthy: pytest.MonkeyPatch) -> None:
    """In a process of its own: the limit is that of the whole process."""
    code = (
        "import json; from tokenmill_worker import machine_checks as m; "
        "m._has_gpu = lambda: False; m.LOW_DISK_BYTES = 0; "
        "print(json.dumps([f.check for f in m.check_machine()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stderr, json.loads(done.stdout)) == ("", ["open-files"])
