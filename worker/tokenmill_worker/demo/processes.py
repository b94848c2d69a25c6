"""The demo's workers: processes of their own that cannot outlive the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenmill._child_process import die_with_parent
from tokenmill_worker.errors import StartupError

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What each worker of the demo is started with."""

    redis_url: str
    model: Path
    count: int
    folder: Path  # for the logs

    @property
    def num_threads(self) -> int:
        """The workers share the cores."""
        return max((os.cpu_count() or 1) // self.count, 1)

    def command(self) -> Sequence[str]:
        command = [
            sys.executable, "-m", "tokenmill_worker",
            "--redis-url", self.redis_url, "--model", str(self.model),
            "--heartbeat-ms", "500",  # the card, which says ready, is written as often
        ]  # fmt: skip
        if self.count > 1:
            command += ["--num-threads", str(self.num_threads)]
        return command


class WorkerProcesses:
    """Starts `options.count` workers on entry and ends them on exit.

    Each has a process group of its own: Ctrl-C in a terminal reaches the demo only, which then
    stops them. If the demo is killed, the system kills them.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def logs(self) -> list[Path]:
        return [self._options.folder / f"worker-{i}.log" for i in range(self._options.count)]

    def check(self) -> None:
        """Raises `StartupError` with the last line of its log if a worker has ended."""
        for process, log in zip(self._processes, self.logs, strict=True):
            status = process.poll()
            if status is not None:
                lines = log.read_text(errors="replace").strip().splitlines()
                last = lines[-1] if lines else "it wrote no log"
                raise StartupError(f"a worker ended with exit status {status}: {last}")

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes.clear()

    def __enter__(self) -> Self:
        try:
            for log in self.logs:
                self._processes.append(self._spawn(log))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                self._options.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
