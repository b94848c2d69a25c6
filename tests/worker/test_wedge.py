"""What hangs turns unready, says where, and ends; another worker goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from support_worker_process import (
    Pool,
    clean_environment,
    eventually,
    pool_of_workers,
    starts_of,
)
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace

STALL_MS = 3000


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


def readiness(address: str) -> tuple[int, list[str]]:
    try:
        with urlopen(f"http://{address}/readyz") as response:
            return response.status, json.load(response)["stuck"]
    except HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)["stuck"]


def test_a_wedged_engine(pool: Pool) -> None:
    worker = pool.start_ready("one", engine_stall_ms=STALL_MS)
    address = pool.cards()[0]["metrics"]
    assert readiness(address) == (200, [])
    for number in range(3):
        pool.submit(f"bystander-{number}", max_tokens=40 + number)
    pool.submit("wedged", "wedge", max_tokens=20)

    assert eventually(lambda: readiness(address) if readiness(address)[0] != 200 else None) == (
        503, ["engine"],
    )  # fmt: skip
    with urlopen(f"http://{address}/healthz") as alive:  # until it gives up on itself
        assert alive.status == 200
    assert worker.wait() == os.EX_SOFTWARE
    assert "engine stalled" in worker.log
    assert 'File "' in worker.log
    assert "in _advance" in worker.log  # where it hung
    assert "wedge" not in worker.log.replace("in wedge", "")  # no prompt

    pool.start_ready("two")
    pool.check_transcript("wedged", "wedge", 7, 20)
    for number in range(3):
        pool.check_transcript(f"bystander-{number}", "hello", 7, 40 + number)
    (first, second) = starts_of(pool.events("wedged"))
    assert first["w"].startswith("one-")
    assert second["w"].startswith("two-")


def run_watched(main: str, *, limit_s: float) -> subprocess.Popen[str]:
    """A process whose event loop does `main` while a watchdog watches it."""
    code = f"""
import asyncio, contextlib, time
from tokenmill_worker.watchdog import Watchdog

def hold_everything():
    time.sleep(1000)

async def main():
    watch = asyncio.create_task(Watchdog(lambda: 0.0, {limit_s}).run())
    await asyncio.sleep(0)
    {main}

asyncio.run(main())
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], env=clean_environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_loop_that_hangs() -> None:
    process = run_watched("hold_everything()", limit_s=1.0)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == os.EX_SOFTWARE
    assert "in hold_everything" in stderr


def test_who_was_stopped_has_not_hung() -> None:
    """Longer than the limit, and in the middle of a round of the loop."""
    process = run_watched(
        "print('up', flush=True); await asyncio.to_thread(input); await asyncio.sleep(1.5)",
        limit_s=1.0,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # the time in which nothing must happen is what is tested
    process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate("go on\n", timeout=60)
    assert (process.returncode, stderr) == (0, "")


def test_the_watch_ends_with_its_task() -> None:
    process = run_watched("watch.cancel(); await asyncio.sleep(0); time.sleep(1.0)", limit_s=0.5)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
