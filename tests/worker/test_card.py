"""The worker's card, and that the exporter finds it, whatever the worker is doing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest
import redis

from support_redis import ServerBackend
from support_waiting import await_until
from support_worker_bench import WORKER, Bench
from tokenmill._backlog_reader import read_pool
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import GROUP, READY_CLASSES
from tokenmill_worker.card import Card


@dataclass
class Shown:
    """A card in the hand of a worker that does nothing else: it loads, or it is full."""

    bench: Bench
    reader: redis.Redis
    state: str = "loading"
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def card(self) -> Card:
        return Card(
            redis=self.bench.redis,
            keys=self.bench.keys,
            worker_id=WORKER,
            interval_s=3600.0,
            lease_ms=60_000,
            facts={"slots": 8},
            state=lambda: {"state": self.state},
            changed=self.changed,
        )

    def enter(self, state: str) -> None:
        self.state = state
        self.changed.set()

    def seen(self) -> str | None:
        """Its state as the exporter sees it; None: it does not."""
        cards = read_pool([(self.reader, self.bench.keys)]).cards
        return str(cards[WORKER]["state"]) if WORKER in cards else None

    @property
    def stream(self) -> str:
        return self.bench.keys.ready(READY_CLASSES[0])


@pytest.fixture
def reader(server: EmbeddedServer) -> Iterator[redis.Redis]:
    client = ServerBackend(server).client()
    yield client
    client.close()


@pytest.fixture
async def shown(server_bench: Bench, reader: redis.Redis) -> AsyncIterator[Shown]:
    shown = Shown(server_bench, reader)
    async with shown.card().shown():
        yield shown


async def test_a_worker_that_loads_is_seen_also_as_the_first_of_its_pool(shown: Shown) -> None:
    await await_until(lambda: shown.seen() == "loading")


async def test_a_full_worker_that_lost_its_name_is_seen_again(shown: Shown) -> None:
    """Tick takes the names of workers that were silent for ten leases; who is full reads nothing
    that would bring the name back."""
    shown.enter("ready")
    await await_until(lambda: shown.seen() == "ready")
    shown.reader.xgroup_delconsumer(shown.stream, GROUP, WORKER)
    assert shown.seen() is None

    shown.changed.set()  # the next heartbeat
    await await_until(lambda: shown.seen() == "ready")


async def test_a_worker_that_drains_takes_its_name_out_for_good(shown: Shown) -> None:
    await await_until(lambda: shown.seen() == "loading")
    shown.enter("draining")
    await await_until(lambda: shown.seen() == "draining")
    shown.reader.xgroup_delconsumer(shown.stream, GROUP, WORKER)
    before = shown.reader.get(shown.bench.keys.worker_card(WORKER))
    shown.reader.delete(shown.bench.keys.worker_card(WORKER))
    shown.changed.set()
    await await_until(lambda: shown.reader.get(shown.bench.keys.worker_card(WORKER)) == before)

    assert shown.reader.xinfo_consumers(shown.stream, GROUP) == []


async def test_a_cancellation_that_redis_py_swallows_is_not_waited_out(
    server_bench: Bench, reader: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = asyncio.Event()

    async def set_and_swallow(*_: object, **__: object) -> None:
        writing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    monkeypatch.setattr(server_bench.redis, "set", set_and_swallow)
    async with asyncio.timeout(20), Shown(server_bench, reader).card().shown():
        await writing.wait()


async def test_at_the_end_the_card_is_gone(server_bench: Bench, reader: redis.Redis) -> None:
    shown = Shown(server_bench, reader)
    async with shown.card().shown():
        await await_until(lambda: shown.seen() == "loading")

    assert shown.seen() is None
    assert not reader.exists(server_bench.keys.worker_card(WORKER))
