"""What waits for room goes to a peer that shows some, and stays where it is otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support_worker_bench import WORKER, Bench, running, until
from support_worker_process import Pool, eventually, pool_of_workers, starts_of
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import GROUP, Keyspace
from tokenmill.scripts import run
from tokenmill_engine.outputs import WaitingRequest
from tokenmill_worker.delivery import Delivery
from tokenmill_worker.give_back import GiveBack
from tokenmill_worker.handover import Handover


@dataclass
class Giver:
    """A worker that has been waiting for room since the beginning of time."""

    bench: Bench
    waiting: tuple[WaitingRequest, ...] = ()
    given: list[str] = field(default_factory=list)
    looks: int = 0

    def __post_init__(self) -> None:
        bench = self.bench
        handover = Handover(
            redis=bench.redis,
            calls=bench.calls,
            deliveries=bench.deliveries,
            retrier=bench.retrier,
            metrics=bench.metrics,
            worker_id=WORKER,
            retry_backoff_ms=1,
        )
        self.loop = GiveBack(
            redis=bench.redis,
            keys=bench.keys,
            deliveries=bench.deliveries,
            handover=handover,
            retrier=bench.retrier,
            worker_id=WORKER,
            after_s=0.01,
            waiting=self._look,
            size_of=lambda delivery: 100,
            on_given_back=self._note,
        )

    def _look(self) -> tuple[WaitingRequest, ...]:
        self.looks += 1
        return self.waiting

    def _note(self, delivery: Delivery) -> None:
        self.given.append(delivery.lease.request_id)

    def waits(self, *deliveries: Delivery) -> None:
        self.waiting = tuple(
            WaitingRequest(delivery.attempt_id, 50, is_blocked=True, overtakes_left=3)
            for delivery in deliveries
        )

    async def show_peer(self, name: str, **card: object) -> None:
        await self.bench.redis.xgroup_createconsumer(self.bench.keys.ready("1"), GROUP, name)
        await self.bench.redis.set(self.bench.keys.worker_card(name), json.dumps(card))

    async def some_looks(self) -> None:
        seen = self.looks
        async with running(self.loop.run()):
            await until(lambda: self.given or self.looks > seen + 12)


@pytest.fixture
def giver(bench: Bench) -> Giver:
    return Giver(bench)


async def test_it_goes_to_a_peer_with_room(giver: Giver) -> None:
    first, second = await giver.bench.deliver("a", "b")
    giver.waits(first)
    await giver.show_peer("peer", state="ready", room_tokens=100)

    await giver.some_looks()
    await until(lambda: first not in giver.bench.deliveries)

    assert giver.given == ["a"]
    assert list(giver.bench.deliveries) == [second]
    assert await giver.bench.redis.hget(giver.bench.keys.record("a"), "state") == "queued"
    assert await giver.bench.redis.xlen(giver.bench.keys.ready("r")) == 1


@pytest.mark.parametrize(
    "card",
    [
        {"state": "ready", "room_tokens": 99},
        {"state": "draining", "room_tokens": 100},
        {"state": "ready"},
        {"state": "ready", "room_tokens": "all"},
    ],
)
async def test_without_room_at_a_peer_it_stays(giver: Giver, card: dict[str, object]) -> None:
    (delivery,) = await giver.bench.deliver("a")
    giver.waits(delivery)
    await giver.show_peer("peer", **card)
    await giver.show_peer(WORKER, state="ready", room_tokens=10_000)  # its own card

    await giver.some_looks()

    assert giver.given == []
    assert list(giver.bench.deliveries) == [delivery]


async def test_a_dead_peers_name_means_nothing(giver: Giver) -> None:
    (delivery,) = await giver.bench.deliver("a")
    giver.waits(delivery)
    await giver.bench.redis.xgroup_createconsumer(giver.bench.keys.ready("1"), GROUP, "dead")

    await giver.some_looks()

    assert giver.given == []


async def test_room_is_given_away_once(giver: Giver) -> None:
    deliveries = await giver.bench.deliver("a", "b", "c")
    giver.waits(*deliveries)
    await giver.show_peer("peer", state="ready", room_tokens=250)
    await giver.show_peer("small", state="ready", room_tokens=50)

    rooms = await giver.loop._rooms_of_peers()
    assert rooms == {"peer": 250, "small": 50}
    await giver.loop._give_back(deliveries)

    assert giver.given == ["a", "b"]


async def test_what_is_not_stored_yet_or_has_its_end_stays(giver: Giver) -> None:
    first, second = await giver.bench.deliver("a", "b")
    first.add_event(ev="start", i=0)
    second.ending = object()  # type: ignore[assignment]
    giver.waits(first, second)
    await giver.show_peer("peer", state="ready", room_tokens=1000)

    await giver.some_looks()

    assert giver.given == []


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


def test_of_two_workers_the_full_one_gives_to_the_other(pool: Pool) -> None:
    """128 tokens of cache each; every request wants 105 of them."""
    cache = {"num_gpu_blocks_override": 8, "block_size": 16, "give_back_ms": 500}
    full = pool.start_ready("full", step_s=1.0, **cache)
    for number in range(2):
        pool.submit(f"request-{number}", max_tokens=100)
    eventually(lambda: len(starts_of(pool.events("request-1"))) == 1)
    eventually(lambda: pool.tokens("request-0"))
    assert starts_of(pool.events("request-1"))[0]["w"].startswith("full")
    assert pool.tokens("request-1") == []

    peer = pool.start_ready("peer", step_s=0.001, **cache)
    pool.check_transcript("request-1", "hello", 7, 100)

    holders = [start["w"].rsplit("-", 2)[0] for start in starts_of(pool.events("request-1"))]
    # On a busy machine the full one may take it again, and give it again.
    assert (holders[0], holders[-1]) == ("full", "peer")
    assert pool.state("request-0") == "leased"
    assert pool.client.hget(pool.keys.record("request-1"), "strikes") == "0"
    run(pool.client, pool.calls.cancel("request-0"))
    assert pool.is_clean()
    assert (full.terminate(), peer.terminate()) == (0, 0)
