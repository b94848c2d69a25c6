"""The benchmark of the hot path runs against today's worker; its figures are not judged here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

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
    assert hot_path._redis_us(own_server, REQUESTS, STEPS) >= 0
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


def test_the_table_has_a_row_for_each_number_of_requests(hot_path: Any) -> None:
    row = {"requests": 64, **dict.fromkeys(hot_path.FIGURES, 1.25)}
    header, figures, prototype = hot_path._table([row]).splitlines()
    assert header.split()[-4:] == list(hot_path.FIGURES)
    assert figures.split() == ["64", *["1.25"] * 4]
    assert prototype.split()[:4] == ["prototype,", "64", "2.7", "2.8"]
