"""Real worker processes whose Redis or engine fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_worker_process import Pool, eventually, pool_of_workers, starts_of
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


def test_a_restarted_redis_is_joined_again(keyspace: Keyspace, tmp_path: Path) -> None:
    with (
        EmbeddedServer(append_only=True) as server,
        pool_of_workers(server, keyspace, tmp_path) as pool,
    ):
        worker = pool.start_ready("only")
        pool.submit("request-1", max_tokens=100)
        eventually(lambda: len(pool.tokens("request-1")) > 5)

        server.kill()
        server.restart()

        pool.check_transcript("request-1", "hello", 7, 100)
        assert len(starts_of(pool.events("request-1"))) == 1
        pool.submit("request-2", max_tokens=3)
        pool.check_transcript("request-2", "hello", 7, 3)
        assert worker.terminate() == os.EX_OK


def test_an_emptied_redis_is_joined_again(keyspace: Keyspace, tmp_path: Path) -> None:
    with (
        EmbeddedServer() as server,
        pool_of_workers(server, keyspace, tmp_path) as pool,
    ):
        pool.start_ready("only")
        pool.submit("request-1", max_tokens=4000)
        eventually(lambda: len(pool.tokens("request-1")) > 5)

        server.restart()

        pool.submit("request-2", max_tokens=3)
        pool.check_transcript("request-2", "hello", 7, 3)
        assert pool.events("request-1") == []


def test_a_failing_engine_ends_the_process_and_gives_requests_back(pool: Pool) -> None:
    worker = pool.start_ready("only", retry_backoff_ms=60_000)
    pool.submit("innocent", max_tokens=4000)
    eventually(lambda: len(pool.tokens("innocent")) > 5)

    pool.submit("guilty", "explode")

    assert worker.wait() == os.EX_SOFTWARE
    assert pool.state("innocent") == "queued"
    assert pool.state("guilty") == "delayed"
    assert "secret" not in worker.log
    assert "RuntimeError" in worker.log


def test_a_hanging_engine_ends_the_process(pool: Pool) -> None:
    worker = pool.start_ready("only", engine_stall_ms=1000)

    pool.submit("hanging", "hang")

    assert worker.wait() == os.EX_SOFTWARE
    assert "in step" in worker.log  # the dumped stack names the place
