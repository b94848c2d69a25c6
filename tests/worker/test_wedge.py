"""What hangs turns unready, says where, and ends; another worker goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_a_loop_that_hangs_with_the_interpreters_lock() -> None:
    """Nothing written in Python can notice: a loop inside of `sum` keeps the lock."""
    code = """
import asyncio
from tokenmill_worker.watchdog import Watchdog

async def main():
    watch = asyncio.create_task(Watchdog(lambda: 0.0, 1.0).run())
    await asyncio.sleep(0)
    hold_everything()

def hold_everything():
    sum(range(10**13))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "in hold_everything" in done.stderr


def test_the_timer_is_taken_down_with_the_watchdog() -> None:
    code = """
import asyncio, contextlib, time
from tokenmill_worker.watchdog import Watchdog

async def main():
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(Watchdog(lambda: 0.0, 0.5).run(), 0.2)

asyncio.run(main())
time.sleep(1.0)
"""
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=False)
    assert done.returncode == 0
