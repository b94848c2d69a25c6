"""The verbs of the Makefile, tried in a copy with a stand-in for Python: nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
VERBS = (
    "setup", "demo", "test", "test-all", "lint", "fmt", "type", "bench", "bench-peers",
    "compose-test", "mutants", "fuzz", "leak", "chaos", "soak",
)  # fmt: skip

#: Notes its arguments; `-m venv FOLDER` makes a folder whose python is this script again.
FAKE_PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; for name in python tokenmill ruff mypy lint-imports; do
        cp "$0" "$3/bin/$name"; done ;;
    "--version") echo "Python 3.13.0" ;;
    *"import ensurepip"*) exit "${WITHOUT_VENV:-0}" ;;
    *"import torch"*) exit "${WITHOUT_TORCH:-0}" ;;
    *"sys.version_info < "*) exit "${TOO_OLD:-0}" ;;
    *"sys.version_info[:2]"*) echo 3.13 ;;
esac
"""


class Checkout:
    """A copy of what `make` reads, and a log of what it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls.txt"
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        shutil.copytree(ROOT / "tools", folder / "tools")
        self.python = folder / "fake-python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run make; `calls()` then holds what this run did."""
        self.calls_file.write_text("")
        return subprocess.run(
            ["make", "--no-print-directory", f"PYTHON={self.python}", *arguments],
            cwd=self.folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "CALLS": str(self.calls_file),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_help_lists_every_verb(checkout: Checkout) -> None:
    listed = set(re.findall(r"^ +make ([a-z-]+)", checkout.make().stdout, re.MULTILINE))

    assert set(VERBS) < listed


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_sets_up_and_runs(checkout: Checkout, verb: str) -> None:
    done = checkout.make(verb)

    assert done.returncode == 0, done.stderr
    assert "-m venv .venv" in checkout.calls()
    assert "-m pip install --editable .[worker,embedded]" in checkout.calls()


def test_setup_installs_in_order_and_prepares_the_model(checkout: Checkout) -> None:
    done = checkout.make("setup", WITHOUT_TORCH="1")

    assert done.returncode == 0, done.stderr
    work = [call for call in checkout.calls() if call.startswith("-m ")]
    assert work == [
        "-m venv .venv",
        "-m pip install torch==2.13.0",
        "-m pip install --editable .[worker,embedded]",
        "-m pip install --editable .[dev]",
        "-m tokenmill_worker.model_store",
    ]


def test_a_torch_that_is_there_stays(checkout: Checkout) -> None:
    checkout.make("setup")

    assert not [call for call in checkout.calls() if "torch==" in call]


def test_setup_installs_nothing_when_nothing_changed(checkout: Checkout) -> None:
    checkout.make("setup")
    checkout.make("setup")

    assert checkout.calls() == ["-m tokenmill_worker.model_store"]


def test_setup_installs_again_when_the_dependencies_changed(checkout: Checkout) -> None:
    checkout.make("setup")
    stamp = checkout.folder / ".venv" / ".stamp-dev"
    later = stamp.stat().st_mtime + 10
    os.utime(checkout.folder / "pyproject.toml", (later, later))

    checkout.make("setup")

    assert "-m pip install --editable .[dev]" in checkout.calls()


def test_a_failed_install_is_tried_again(checkout: Checkout) -> None:
    checkout.make("setup")
    python = checkout.folder / ".venv" / "bin" / "python"
    python.write_text(FAKE_PYTHON + '\ncase "$*" in *"install"*) exit 1 ;; esac\n')
    stamp = checkout.folder / ".venv" / ".stamp-dev"
    stamp.unlink()

    assert checkout.make("setup").returncode != 0
    assert not stamp.exists()


def test_demo_needs_no_development_tools(checkout: Checkout) -> None:
    checkout.make("demo", "ARGS=--requests 2")

    assert "demo --requests 2" in checkout.calls()
    assert not [call for call in checkout.calls() if "[dev]" in call]


def test_missing_venv_package_is_named(checkout: Checkout) -> None:
    done = checkout.make("setup", WITHOUT_VENV="1")

    assert done.returncode != 0
    assert "sudo apt install python3-venv" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_old_python_is_refused(checkout: Checkout) -> None:
    tools = checkout.folder / "bin"
    tools.mkdir()
    for name in ("sh", "make", "sed", "mkdir", "cp", "touch"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)

    done = checkout.make("setup", TOO_OLD="1", PATH=str(tools))

    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr


def test_quick_tests_leave_the_slow_ones_out(checkout: Checkout) -> None:
    checkout.make("test")
    quick = [call for call in checkout.calls() if call.startswith("-m pytest")]
    checkout.make("test-all")
    everything = [call for call in checkout.calls() if call.startswith("-m pytest")]

    assert len(quick) == len(everything) == 1
    assert "-m not slow" in quick[0]
    assert "not slow" not in everything[0]
