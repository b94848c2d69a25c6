"""What one worker does for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support_worker_bench import Bench, running, until
from tokenmill._backlog import CAPACITY_FIELD
from tokenmill.scripts import arun
from tokenmill_engine.outputs import EngineStats
from tokenmill_worker import maintenance
from tokenmill_worker.maintenance import Maintenance
from tokenmill_worker.workload import Workload


def make_maintenance(bench: Bench) -> Maintenance:
    return Maintenance(
        redis=bench.redis,
        calls=bench.calls,
        retrier=bench.retrier,
        metrics=bench.metrics,
        workload=Workload(bench.deliveries, EngineStats, lambda: False),
        interval_s=0.001,
    )


async def test_deadlines_are_swept_and_counted(server_bench: Bench) -> None:
    bench = server_bench
    await arun(bench.redis, bench.calls.enqueue("request-1", body="{}", deadline_ms=1))
    await arun(bench.redis, bench.calls.enqueue("request-2", body="{}"))

    async with running(make_maintenance(bench).run()):
        await until(lambda: bench.metrics.maintenance["expired"]._value.get() == 1)

    assert (await bench.log("request-1"))[-1]["code"] == "deadline_exceeded"


async def test_the_speed_is_left_in_redis_for_whoever_starts_the_first_worker(
    server_bench: Bench,
) -> None:
    keeper = make_maintenance(server_bench)
    await keeper._measure()
    assert await server_bench.redis.hget(server_bench.keys.maintenance, CAPACITY_FIELD) is None

    keeper.workload = SimpleNamespace(  # type: ignore[assignment]
        measure=lambda: None, capacity_tokens_per_s=123.456
    )
    await keeper._measure()
    assert await server_bench.redis.hget(server_bench.keys.maintenance, CAPACITY_FIELD) == "123.5"


async def test_short_memory_is_flagged(
    server_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = server_bench
    monkeypatch.setattr(maintenance, "MEMORY_HIGH", 0.0)

    await make_maintenance(bench)._check_memory()

    assert 0 < await bench.redis.pttl(bench.keys.memory_flag) <= maintenance.MEMORY_FLAG_MS


async def test_enough_memory_is_not_flagged(server_bench: Bench) -> None:
    keeper = make_maintenance(server_bench)

    await keeper._check_memory()

    assert not await server_bench.redis.exists(server_bench.keys.memory_flag)
