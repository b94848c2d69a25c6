"""Starting, awaiting and ending the servers that a contestant measures. Standard library only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

STOP_TIMEOUT_S = 30.0


class StartFailed(RuntimeError):
    """A server ended or kept silent instead of becoming ready; its output is on stderr."""


@contextmanager
def running(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own group, with its output on our stderr; ended with its children.

    `environment` replaces this process's own.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it
    process.wait()


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], *, timeout_s: float, what: str
) -> None:
    """Poll `ready` until it holds; raises `StartFailed` when the process ends or time is up."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None:
            raise StartFailed(f"{what} ended with code {process.returncode}")
        if time.monotonic() > deadline:
            raise StartFailed(f"{what} was not ready within {timeout_s:.0f} s")
        time.sleep(0.25)


def answers(url: str) -> bool:
    """Whether a GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
