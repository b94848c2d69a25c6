"""One run of the queue without a model: a server, a fleet of workers, one client process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import psutil

from tokenmill import AsyncClient
from tokenmill.keys import Keyspace
from tokenmill.protocol import TokenEvent

from . import environments
from .measure import percentile
from .scale_fleet import FleetOptions
from .scale_servers import Servers, servers

READY_TIMEOUT_S = 120.0
IDLE_S = 3.0
PATIENCE_S = 60.0
#: Requests of one tenant wait for its window, so each tenant gets few.
STREAMS_PER_TENANT = 16
#: Streams are begun this many at a time: no client begins 16,384 in one instant.
BEGIN_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class Scenario:
    """`streams` at once, spread over `workers`. `kills`: one worker, when a third is generated."""

    name: str
    workers: int
    streams: int
    tokens: int
    step_ms: float
    flush_ms: int = 0
    lease_ms: int = 15_000
    partitions: int = 1
    nodes: int = 1  # of Redis; more than one are a cluster
    kills: bool = False

    @property
    def slots(self) -> int:
        """Of each worker. Where one is killed, the others can take its streams at once."""
        serving = self.workers - self.kills
        return -(-self.streams // serving)


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Rates are per second of the run, CPU times in µs for each token of it."""

    scenario: Scenario
    duration_s: float
    tok_s: float
    tokens_per_event: float
    redis_us: float  # all nodes together
    busiest_node: float  # its share of that
    workers_us: float
    client_us: float
    redis_mb: float
    peak_streams: int  # open at one time
    idle_redis_ms_s: float  # ms of CPU per second that the idle fleet costs Redis
    idle_workers_ms_s: float
    ttft_p50_s: float
    gap_p50_s: float  # of all gaps between two events of a stream
    longest_gap_s: float
    recovery_p50_s: float  # of the streams that the killed worker held; 0 where none is
    affected: int


@dataclass(slots=True)
class Reading:
    """What one client process saw of all streams."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    longest_s: list[float] = field(default_factory=list)
    tokens: int = 0
    events: int = 0
    open: int = 0
    peak: int = 0
    a_third: int = 0
    has_a_third: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        self.events += 1
        if self.tokens >= self.a_third:
            self.has_a_third.set()


def measure(scenario: Scenario) -> Row:
    with servers(scenario.nodes) as redis, _fleet(scenario, redis) as pids:
        workers = [psutil.Process(pid) for pid in pids]
        before = sum(redis.cpu_s()), sum(map(_cpu_s, workers))
        time.sleep(IDLE_S)
        nodes_before_s = redis.cpu_s()
        after = sum(nodes_before_s), sum(map(_cpu_s, workers))
        client = psutil.Process()
        client_before_s, began_s = _cpu_s(client), time.perf_counter()
        victim = pids[0] if scenario.kills else None
        reading = asyncio.run(_read_all(redis.url, scenario, victim))
        duration_s = time.perf_counter() - began_s
        # The killed one's CPU time is gone with it.
        worker_s = 0.0 if scenario.kills else sum(map(_cpu_s, workers)) - after[1]
        client_s = _cpu_s(client) - client_before_s
        pairs = zip(nodes_before_s, redis.cpu_s(), strict=True)
        nodes_s = [after_s - before_s for before_s, after_s in pairs]
        redis_s, peak = sum(nodes_s), redis.peak_bytes()
    # Half a lease without a token: nothing but a lost worker makes that.
    affected = [gap for gap in reading.longest_s if gap > scenario.lease_ms / 2000]
    return Row(
        scenario=scenario,
        duration_s=duration_s,
        tok_s=reading.tokens / duration_s,
        tokens_per_event=reading.tokens / reading.events,
        redis_us=redis_s / reading.tokens * 1e6,
        busiest_node=max(nodes_s) / redis_s if redis_s else 1.0,
        workers_us=worker_s / reading.tokens * 1e6,
        client_us=client_s / reading.tokens * 1e6,
        redis_mb=peak / 1e6,
        peak_streams=reading.peak,
        idle_redis_ms_s=(after[0] - before[0]) / IDLE_S * 1e3,
        idle_workers_ms_s=(after[1] - before[1]) / IDLE_S * 1e3,
        ttft_p50_s=percentile(reading.first_s, 50),
        # There are none where every answer came as one event.
        gap_p50_s=percentile(reading.gaps_s or [0.0], 50),
        longest_gap_s=max(reading.longest_s),
        recovery_p50_s=percentile(affected, 50) if scenario.kills and affected else 0.0,
        affected=len(affected) if scenario.kills else 0,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _fleet(scenario: Scenario, redis: Servers) -> Iterator[list[int]]:
    """The pids of the workers, all of them ready."""
    options = FleetOptions(
        redis_url=redis.url,
        workers=scenario.workers,
        slots=scenario.slots,
        step_ms=scenario.step_ms,
        flush_ms=scenario.flush_ms,
        lease_ms=scenario.lease_ms,
        partitions=scenario.partitions,
    )
    command = [sys.executable, "-m", "benchmarks.scale_fleet", json.dumps(asdict(options))]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENMILL_")}
    fleet = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, cwd=environments.REPOSITORY
    )
    assert fleet.stdin is not None
    try:
        _wait_for_cards(redis, scenario.workers, fleet)
        yield [child.pid for child in psutil.Process(fleet.pid).children()]
    finally:
        fleet.stdin.close()
        fleet.wait()


def _wait_for_cards(redis: Servers, workers: int, fleet: subprocess.Popen[bytes]) -> None:
    """A worker's card says that it is ready."""
    # With partitions, every one of them has a card of every worker.
    pattern = Keyspace().worker_cards.replace("{default.0}", "{default*}")
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while True:
        cards = [json.loads(card) for card in redis.keys(pattern)]
        if len({card["id"] for card in cards if card["state"] == "ready"}) >= workers:
            return
        if fleet.poll() is not None or time.monotonic() > give_up_at:
            raise SystemExit("the workers did not get ready")
        time.sleep(0.2)


async def _read_all(url: str, scenario: Scenario, victim: int | None) -> Reading:
    """All streams of a scenario in this process; kills the victim on the way."""
    reading = Reading(a_third=scenario.streams * scenario.tokens // 3)
    gate = asyncio.Semaphore(BEGIN_AT_A_TIME)
    # A machine that starts 64 workers answers late; that is no failure here.
    async with (
        AsyncClient(url, timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S) as client,
        asyncio.TaskGroup() as group,
    ):
        if victim is not None:
            group.create_task(_kill_later(victim, reading))
        for number in range(scenario.streams):
            group.create_task(_read(client, number, scenario, reading, gate))
    expected = scenario.streams * scenario.tokens
    if reading.tokens != expected:
        raise SystemExit(f"{reading.tokens} tokens came of {expected}")
    return reading


async def _kill_later(pid: int, reading: Reading) -> None:
    await reading.has_a_third.wait()
    os.kill(pid, signal.SIGKILL)


async def _read(
    client: AsyncClient,
    number: int,
    scenario: Scenario,
    reading: Reading,
    gate: asyncio.Semaphore,
) -> None:
    last_s = longest_s = 0.0
    async with gate:
        sent_s = time.perf_counter()
        stream = client.stream(
            [1],
            max_tokens=scenario.tokens,
            ignore_eos=True,
            tenant=f"tenant-{number // STREAMS_PER_TENANT}",
        )
        await stream.__aenter__()
        reading.open += 1
        reading.peak = max(reading.peak, reading.open)
    try:
        async for event in stream.events():
            if not isinstance(event, TokenEvent):
                continue
            now_s = time.perf_counter()
            if last_s:
                reading.gaps_s.append(now_s - last_s)
                longest_s = max(longest_s, now_s - last_s)
            else:
                reading.first_s.append(now_s - sent_s)
            last_s = now_s
            reading.count(len(event.token_ids))
    finally:
        await stream.__aexit__(None, None, None)
        reading.open -= 1
    reading.longest_s.append(longest_s)
