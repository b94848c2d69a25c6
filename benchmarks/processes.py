"""Starting, awaiting and ending the servers that a contestant measures. Standard library only."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

STOP_TIMEOUT_S = 30.0
POLL_S = 0.1


class StartFailed(RuntimeError):
    """A server ended or kept silent instead of becoming ready; its output is on stderr."""


@contextmanager
def running(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this one's group with its output on our stderr; ended on exit.

    `environment` replaces this process's own. Whoever started the group ends what a killed
    process leaves behind in it.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, env=environment
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def signal_group(process: subprocess.Popen[str], number: int) -> None:
    """Signal a process that leads a group, and all that is left of the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


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
        time.sleep(POLL_S)


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
