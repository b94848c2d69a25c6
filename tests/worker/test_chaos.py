"""Frozen workers and a frozen Redis: what a kill does not show."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_worker_process import Pool, eventually, pool_of_workers, starts_of
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

REQUESTS = [f"request-{number}" for number in range(6)]
TOKENS = 300


@pytest.fixture
def pool(keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    """On a server of its own, which a test may freeze."""
    with EmbeddedServer() as server, pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


def submit_and_stream(pool: Pool) -> None:
    for request_id in REQUESTS:
        pool.submit(request_id, max_tokens=TOKENS)
    eventually(lambda: all(len(pool.tokens(request_id)) > 20 for request_id in REQUESTS))


def test_a_worker_that_wakes_up_late_writes_nothing(pool: Pool) -> None:
    zombie = pool.start_ready("zombie")
    submit_and_stream(pool)

    zombie.process.send_signal(signal.SIGSTOP)
    successor = pool.start("successor")
    eventually(
        lambda: all(
            starts_of(pool.events(request_id))[-1]["w"].startswith("successor")
            for request_id in REQUESTS
        )
    )
    zombie.process.send_signal(signal.SIGCONT)

    for request_id in REQUESTS:
        pool.check_transcript(request_id, "hello", 7, TOKENS)
    assert "request dropped" in zombie.log
    assert (zombie.terminate(), successor.terminate()) == (os.EX_OK, os.EX_OK)
    assert pool.is_clean()


def test_after_a_frozen_redis_everybody_keeps_what_it_had(pool: Pool) -> None:
    workers = [pool.start_ready("first"), pool.start_ready("second")]
    submit_and_stream(pool)

    os.kill(pool.server.pid, signal.SIGSTOP)
    # A write that times out took longer than a lease, and than the engine works without one.
    eventually(lambda: any("call=append" in worker.log for worker in workers))
    os.kill(pool.server.pid, signal.SIGCONT)

    for request_id in REQUESTS:
        pool.check_transcript(request_id, "hello", 7, TOKENS)
        assert len(starts_of(pool.events(request_id))) == 1
    assert [worker.terminate() for worker in workers] == [os.EX_OK, os.EX_OK]
    assert pool.is_clean()
