"""What lands in site-packages: built by the real backend, without network or isolation."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "tokenmill": ROOT / "client" / "tokenmill",
    "tokenmill_engine": ROOT / "engine" / "tokenmill_engine",
    "tokenmill_worker": ROOT / "worker" / "tokenmill_worker",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_top_level_is_the_three_packages(wheel: zipfile.ZipFile) -> None:
    top_level = {name.split("/")[0] for name in wheel.namelist()}

    assert {name for name in top_level if not name.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile, package: str) -> None:
    folder = PACKAGES[package]
    suffixes = {".py", ".lua", ".typed"}
    expected = {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for file in folder.rglob("*")
        if file.suffix in suffixes and "__pycache__" not in file.parts
    } | {f"{package}/py.typed"}

    assert expected - set(wheel.namelist()) == set()


def test_the_scripts_of_the_protocol_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    lua = [name for name in wheel.namelist() if re.fullmatch(r"tokenmill/lua/\w+\.lua", name)]

    assert lua


def test_the_sdk_needs_redis_and_pydantic_and_nothing_else(metadata: Message) -> None:
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]

    names = {re.match(r"[A-Za-z0-9._-]+", line)[0] for line in base}  # type: ignore[index]
    assert names == {"redis", "pydantic"}


def test_commands_of_the_worker_are_plugged_in(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    entry_points = wheel.read(name).decode()

    assert "tokenmill = tokenmill.__main__:main" in entry_points
    assert "[tokenmill.commands]" in entry_points


def test_the_licence_travels_along(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode > 1:  # 1: nothing found
        pytest.skip("not a checkout of git")
    return done.stdout


def test_what_was_compiled_or_measured_here_stays_here() -> None:
    made = [
        "engine/tokenmill_engine/kernels/prebuilt/linear-x86-64-v3-0.so",
        "engine/tokenmill_engine/kernels/linear.so",
        "benchmarks/results/scale.json",
        "benchmarks/results/2026-01-01.svg",
        ".tools/bin/kubectl",
        "secrets/worker",
    ]

    assert git("check-ignore", *made).split() == made
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == ""
