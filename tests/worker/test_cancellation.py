"""Loops that talk to Redis end when they are cancelled, at whatever moment that comes."""

from __future__ import annotations

import asyncio

import pytest

from support_worker_bench import Bench
from tokenmill.keys import GROUP
from tokenmill_worker.cancellation import raise_if_cancelled


async def read_for_ever(bench: Bench) -> None:
    streams = {bench.keys.ready("1"): ">"}
    while True:
        raise_if_cancelled()
        await bench.redis.xreadgroup(GROUP, "worker-1", streams, block=20)


@pytest.mark.parametrize("rounds", range(14))
async def test_a_cancelled_reader_ends(server_bench: Bench, rounds: int) -> None:
    """Without the check, some of these moments leave the reader running for ever on 3.11."""
    stream = server_bench.keys.ready("1")
    await server_bench.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
    await server_bench.redis.connection_pool.disconnect()
    task = asyncio.create_task(read_for_ever(server_bench))
    for _ in range(rounds):
        await asyncio.sleep(0)

    task.cancel()

    done, _ = await asyncio.wait([task], timeout=10)
    assert done
    assert task.cancelled()


async def test_a_task_that_was_not_cancelled_goes_on() -> None:
    raise_if_cancelled()
