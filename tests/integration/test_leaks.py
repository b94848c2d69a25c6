"""Thousands of requests, used and left in every way, leave nothing behind in SDK and server."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_leaks import TASKS, THREADS, Sample, take_sample, use_async, use_sync
from support_worker_process import Pool, eventually, pool_of_workers
from tokenmill import AsyncClient, Client
from tokenmill.calls import QueuePolicy
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace

#: Long enough for a stream to be read on a slow machine. At the end it is waited for.
RETENTION_S, LONGER_RETENTION_S = 2, 8
#: Of the SDK's process, from the third round to the last.
MAX_GROWTH_BYTES = 4 * 2**20


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


def check(samples: list[Sample], most_connections: int) -> None:
    steady = samples[2:]
    for sample in steady:
        assert sample.channels == 1, sample.line()  # the one that keeps the connection open
        assert 0 < sample.connections <= most_connections, sample.line()
        assert sample.threads == steady[0].threads, sample.line()
    assert steady[-1].rss_bytes - steady[0].rss_bytes < MAX_GROWTH_BYTES


def nothing_is_left_of_requests(pool: Pool) -> bool:
    patterns = [pool.keys.record("*"), pool.keys.log("*")]
    return pool.is_clean() and not any(
        next(pool.client.scan_iter(pattern, count=1000), None) for pattern in patterns
    )


def run_all(pool: Pool, count: int, retention_s: int) -> list[Sample]:
    pool.start_ready("only", step_s=0.0005, max_num_seqs=64, retention_s=retention_s)
    before, threads = take_sample(pool), set(threading.enumerate())
    options = {
        "namespace": pool.keys.namespace,
        "policy": QueuePolicy(retention_ms=retention_s * 1000),
    }
    with Client(pool.server.url, **options) as client:  # type: ignore[arg-type]
        samples = use_sync(pool, client, count // 2)
    # One connection per thread at work, and the subscription.
    check(samples, before.connections + THREADS + 1)

    async def run_async() -> list[Sample]:
        async with AsyncClient(pool.server.url, **options) as client:  # type: ignore[arg-type]
            return await use_async(pool, client, count // 2)

    more = asyncio.run(run_async())
    check(more, before.connections + 2 * TASKS + 1)
    eventually(lambda: take_sample(pool).connections == before.connections)
    assert set(threading.enumerate()) <= threads
    eventually(lambda: nothing_is_left_of_requests(pool))
    return [before, *samples, *more, take_sample(pool)]


def test_four_hundred_requests_leave_nothing_behind(pool: Pool) -> None:
    run_all(pool, 400, RETENTION_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_requests_leave_nothing_behind(pool: Pool) -> None:
    samples = run_all(pool, 10_000, LONGER_RETENTION_S)
    sys.stdout.write("\n" + "\n".join(sample.line() for sample in samples) + "\n")
