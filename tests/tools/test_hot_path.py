"""The benchmark of the hot path runs against today's worker; its figures are not judged here."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from support_tokenizers import byte_level_bpe
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace

REPOSITORY = Path(__file__).resolve().parents[2]
REQUESTS, STEPS = 3, 7


@pytest.fixture
def hot_path(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY)
    monkeypatch.chdir(REPOSITORY)
    from benchmarks import hot_path

    return hot_path


@pytest.fixture
def own_server() -> Any:
    """The benchmark uses the default pool."""
    with EmbeddedServer() as server:
        yield server


def log_lengths(server: EmbeddedServer, name: str) -> list[int]:
    with connect(server.url) as client:
        return [client.xlen(Keyspace().log(f"{name}-{n}")) for n in range(REQUESTS)]


def test_the_servers_part(hot_path: Any, own_server: EmbeddedServer) -> None:
    assert hot_path.redis_us(own_server, REQUESTS, STEPS) >= 0
    assert log_lengths(own_server, "request") == [STEPS] * REQUESTS


@pytest.mark.parametrize("dispatch", [False, True])
def test_the_event_loops_part(hot_path: Any, own_server: EmbeddedServer, dispatch: bool) -> None:
    assert asyncio.run(hot_path._loop_us(own_server, REQUESTS, STEPS, dispatch=dispatch)) > 0
    assert log_lengths(own_server, "request") == [STEPS] * REQUESTS


def test_a_whole_worker(
    hot_path: Any, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_path, "WORKER_STEPS", STEPS)
    hot_path._worker_us(own_server, REQUESTS)
    # A start event, a token in each step but for what a slow machine joins, and the end.
    assert all(2 < length <= STEPS + 2 for length in log_lengths(own_server, "timed"))


def test_the_prototypes_part(
    hot_path: Any, own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is laid out as the prototype's is, with a script that stores every event."""
    script = (
        "local out = {} for i = 1, tonumber(ARGV[2]) do "
        "redis.call('XADD', ARGV[1] .. 't:' .. ARGV[4 * i], '*', 'd', ARGV[4 * i + 3]) "
        "out[i] = 1 end return out"
    )
    (tmp_path / "common.py").write_text(
        "P = ''\n"
        "class Scripts:\n"
        f"    src = {{'append': {script!r}}}\n"
        "    def __init__(self, client):\n"
        "        self.client = client\n"
        "    async def __call__(self, name, *arguments):\n"
        "        return await self.client.eval(self.src[name], 0, P, *arguments)\n"
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "common", raising=False)
    prototype = hot_path.Prototype(tmp_path)
    monkeypatch.delitem(sys.modules, "common")

    assert len(asyncio.run(prototype.publish_us(own_server, REQUESTS, STEPS))) == STEPS
    assert log_lengths(own_server, "request") == [STEPS] * REQUESTS


def test_the_table_has_a_row_for_each_number_of_requests(hot_path: Any) -> None:
    row = {"requests": 64, **dict.fromkeys(hot_path.FIGURES, 1.25)}
    header, figures = hot_path._table([row]).splitlines()
    assert header.split()[-4:] == list(hot_path.FIGURES)
    assert figures.split() == ["64", *["1.25"] * 4]


def test_the_engines_own_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    from benchmarks import step_overhead

    tokenizer = byte_level_bpe()
    for kind in step_overhead.KINDS:
        figures = step_overhead.measure(tokenizer, kind, REQUESTS, STEPS, len(tokenizer))
        assert figures.keys() == set(step_overhead.PHASES)
        assert all(ms > 0 for ms in figures.values())


def test_the_delay_of_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    monkeypatch.chdir(REPOSITORY)
    from benchmarks import latency

    delays_ms = latency.measure(streams=2, tokens=STEPS, step_s=0.002)

    assert len(delays_ms) == 2 * STEPS
    assert min(delays_ms) > 0
