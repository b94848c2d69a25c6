"""Real workers and clients on every kind of Redis: single servers of three releases, Sentinel with
a failover, a cluster whose slots move."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from support_queue import POLICY, Queue
from support_redis import unique_keyspace
from support_servers import (
    MASTER_NAME,
    Cluster,
    SentinelSetup,
    Server,
    begin_move,
    end_move,
    move_slot,
    move_slot_at_once,
    single,
    until,
)
from support_topologies import SEED, Readers, workers_of
from support_worker import expected_tokens
from support_worker_process import eventually
from tokenmill import (
    AsyncClient,
    Client,
    ConfigurationError,
    ProtocolError,
    QueueUnavailable,
    UnknownRequest,
)
from tokenmill._redis import aconnect, connect
from tokenmill._redis_errors import is_retryable
from tokenmill.cli.snapshot import read_snapshot
from tokenmill.keys import Keyspace, partition_of
from tokenmill.pool_meta import akeep_partitions, asettle_partitions
from tokenmill.replies import FinishStatus
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import load_settings

PARTITIONS = 3


def unique_pool() -> str:
    return unique_keyspace().namespace


def ids(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


async def generate_all(url: str, pool: str, prompts: list[str]) -> list[list[int]]:
    async with AsyncClient(url, pool=pool, retry_for_s=20) as client:
        answers = await asyncio.gather(
            *(client.generate(prompt, max_tokens=20, seed=SEED) for prompt in prompts)
        )
    return [answer.token_ids for answer in answers]


def check_every_call(client: Client) -> None:
    """All that a client can do with a request, over all partitions."""
    for number in range(6):
        request_id = f"call-{number}"
        assert client.submit("hello", request_id=request_id, max_tokens=3000).is_new
        assert not client.submit("hello", request_id=request_id, max_tokens=3000).is_new
        assert client.status(request_id).id == request_id
        assert request_id in str(client.explain(request_id))
        assert client.cancel(request_id)
        assert client.status(request_id).state == "cancelled"
        assert client.attach(request_id).id == request_id
    with pytest.raises(UnknownRequest):
        client.status("nobody")


# ---- single servers ----


def one_quick(quick: str, *others: str) -> list[Any]:
    """Parameters of which all but the first run in `make test-all` only."""
    return [quick, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


@pytest.fixture(scope="module", params=one_quick("valkey-9", "redis-7.0", "redis-6.2"))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with single(request.param, "--appendonly", "yes") as server:
        yield server


@pytest.mark.parametrize("partitions", [1, PARTITIONS])
async def test_a_single_server(server: Server, partitions: int, tmp_path: Path) -> None:
    pool = unique_pool()
    with (
        workers_of(server.url, pool, tmp_path) as workers,
        Client(server.url, pool=pool) as client,
    ):
        workers.start("one", partitions=partitions)
        two = workers.start("two")  # learns the number from Redis
        readers = Readers(client)
        readers.read(ids("r", 12), num_tokens=30)
        prompts = [f"async {number}" for number in range(6)]
        answers = await generate_all(server.url, pool, prompts)
        readers.finish()
        check_every_call(client)

        assert two.terminate() == 0
        assert answers == [expected_tokens(p.encode(), SEED, 20) for p in prompts]
        with closing(server.client()) as redis:
            for request_id in ids("r", 12):
                home = Keyspace(pool=pool, partition=partition_of(request_id, partitions))
                assert redis.exists(home.record(request_id))


def test_workers_may_share_the_partitions(server: Server, tmp_path: Path) -> None:
    pool = unique_pool()
    with (
        workers_of(server.url, pool, tmp_path) as workers,
        Client(server.url, pool=pool) as client,
    ):
        served = {"low": "0", "high": "1,2"}
        for name, numbers in served.items():
            workers.start(name, partitions=PARTITIONS, serve_partitions=numbers)
        request_ids = ids("r", 12)
        readers = Readers(client)
        readers.read(request_ids, num_tokens=5)
        readers.finish()
        for request_id in request_ids:
            worker = client.status(request_id).worker or ""
            number = partition_of(request_id, PARTITIONS)
            assert str(number) in served[worker.partition("-")[0]]


def test_no_lane_takes_more_than_the_worker_has_room_for(server: Server, tmp_path: Path) -> None:
    pool = unique_pool()
    keyspaces = Keyspace(pool=pool).partitions(PARTITIONS)
    most_leased = 0
    with (
        workers_of(server.url, pool, tmp_path) as workers,
        Client(server.url, pool=pool) as client,
        closing(server.client()) as redis,
    ):
        assert workers.start("first", partitions=PARTITIONS).terminate() == 0
        request_ids = ids("r", 30)
        for request_id in request_ids:
            client.submit("hello", request_id=request_id, max_tokens=15, seed=SEED)
        waiting = read_snapshot(client._link.partitions())
        assert waiting.queued == waiting.tenants["default"] == 30
        assert sum(depth.ready + depth.held for depth in waiting.classes) == 30
        workers.start("small", max_num_seqs=2)
        assert len(read_snapshot(client._link.partitions()).workers) == 1
        while not all(client.status(request_id).ended for request_id in request_ids):
            with redis.pipeline(transaction=True) as snapshot:
                for keys in keyspaces:
                    snapshot.hget(keys.counters, "leased")
                most_leased = max(most_leased, sum(int(n or 0) for n in snapshot.execute()))
        assert 1 <= most_leased <= 2


def test_a_drain_hands_over_every_lane(server: Server, tmp_path: Path) -> None:
    pool = unique_pool()
    with (
        workers_of(server.url, pool, tmp_path) as workers,
        Client(server.url, pool=pool) as client,
    ):
        # Ready in time, but asleep: at first everything is with the other one.
        second = workers.start("second", step_s=0.02, partitions=PARTITIONS)
        second.process.send_signal(signal.SIGSTOP)
        with closing(server.client()) as redis:
            eventually(lambda: redis.info("clients")["blocked_clients"] == 0)
        first = workers.start("first", step_s=0.02)
        readers = Readers(client)
        request_ids = ids("r", 12)
        readers.read(request_ids, num_tokens=150)
        eventually(lambda: all(transcript.events for transcript in readers.transcripts))
        second.process.send_signal(signal.SIGCONT)
        assert first.terminate() == 0
        readers.finish()
        # More than one where the second worker gave one back for lack of room.
        assert min(client.status(request_id).attempts for request_id in request_ids) >= 2
        assert [transcript.num_rewinds for transcript in readers.transcripts] == [0] * 12


async def test_a_pool_is_divided_once(server: Server) -> None:
    keys, in_use = Keyspace(pool=unique_pool()), Keyspace(pool=unique_pool())
    with Client(server.url, pool=in_use.pool) as client:
        client.submit("hello")
    async with aconnect(server.url) as redis:
        assert await asettle_partitions(redis, redis, keys, PARTITIONS) == PARTITIONS
        assert await asettle_partitions(redis, redis, keys, None) == PARTITIONS
        with pytest.raises(ConfigurationError, match=f"pool {keys.pool} has {PARTITIONS}"):
            await asettle_partitions(redis, redis, keys, PARTITIONS + 1)
        with pytest.raises(ConfigurationError, match="has requests in a single partition"):
            await asettle_partitions(redis, redis, in_use, PARTITIONS)
        assert await asettle_partitions(redis, redis, in_use, None) == 1
        # Redis loses its data: workers write it again, and never change what is there.
        await redis.delete(keys.meta)
        await akeep_partitions(redis, keys, PARTITIONS)
        await akeep_partitions(redis, keys, PARTITIONS + 1)
        assert await redis.hget(keys.meta, "partitions") == str(PARTITIONS)


@pytest.mark.parametrize("stored", ["0", "x", "-1", "1025"])
def test_a_number_of_partitions_that_makes_no_sense(server: Server, stored: str) -> None:
    keys = Keyspace(pool=unique_pool())
    with closing(server.client()) as redis, Client(server.url, pool=keys.pool) as client:
        redis.hset(keys.meta, "partitions", stored)
        with pytest.raises(ProtocolError, match="partitions"):
            client.submit("hello")


def test_a_worker_serves_partitions_that_exist() -> None:
    settings = load_settings({"serve_partitions": "2,0,2"})
    assert settings.served_partitions(3) == [0, 2]
    assert load_settings({}).served_partitions(3) == [0, 1, 2]
    with pytest.raises(ConfigurationError, match="the highest is 1"):
        settings.served_partitions(2)
    with pytest.raises(SettingsError, match="serve_partitions: must be numbers"):
        load_settings({"serve_partitions": "0-2"})


def test_ids_spread_over_the_partitions() -> None:
    """The check value of CRC-32, which any language has."""
    assert partition_of("123456789", 1 << 32) == 0xCBF43926
    homes = [partition_of(request_id, PARTITIONS) for request_id in ids("r", 3000)]
    assert all(900 < homes.count(number) < 1100 for number in range(PARTITIONS))


# ---- Sentinel ----


@pytest.mark.parametrize("release", one_quick("redis-7.0", "valkey-9"))
def test_a_failover_ends_every_stream_exactly_once(release: str, tmp_path: Path) -> None:
    pool = unique_pool()
    with (
        SentinelSetup(release) as setup,
        workers_of(setup.url, pool, tmp_path) as workers,
        Client(setup.url, pool=pool, retry_for_s=30) as client,
    ):
        for name in ("one", "two"):
            workers.start(name, step_s=0.02)
        readers = Readers(client)
        readers.read(ids("r", 16), num_tokens=150)
        eventually(lambda: readers.num_tokens > 16 * 20)
        setup.master.kill()
        readers.finish()

        (replica,) = setup.replicas
        assert setup.master_port() == replica.port
        assert all(worker.process.poll() is None for worker in workers.processes)
        readers = Readers(client)  # and everything goes on with the new master
        readers.read(ids("s", 4), num_tokens=5)
        readers.finish()
        with closing(replica.client()) as redis:
            assert redis.exists(Keyspace(pool=pool).record("s-0"))


async def test_a_client_that_comes_in_the_failover_itself_waits_for_its_end() -> None:
    """For three seconds Sentinel names a master that is dead: longer than a Redis that never
    answered is waited for."""
    pool = unique_pool()
    with SentinelSetup("redis-7.0") as setup:
        for sentinel in setup.sentinels:
            with closing(sentinel.client()) as redis:
                redis.sentinel_set(MASTER_NAME, "down-after-milliseconds", 3000)
        setup.master.kill()
        hasty = Client(setup.url, pool=pool, retry_for_s=0.1)
        with hasty, pytest.raises(QueueUnavailable):
            hasty.submit("x", request_id="never")
        async with AsyncClient(setup.url, pool=pool, retry_for_s=30) as aclient:
            with Client(setup.url, pool=pool, retry_for_s=30) as client:
                handles = await asyncio.gather(
                    asyncio.to_thread(client.submit, "x", request_id="sync"),
                    asyncio.to_thread(client.submit, "x", request_id="sync-too"),
                    aclient.submit("x", request_id="async"),
                    aclient.submit("x", request_id="async-too"),
                )
        assert all(handle.is_new for handle in handles)
        (replica,) = setup.replicas
        assert setup.master_port() == replica.port


@pytest.mark.slow
def test_a_master_that_lives_on_after_its_time_is_left(tmp_path: Path) -> None:
    """A planned failover: for some ten seconds Sentinel lets the old master be. What keeps it from
    taking writes that will be lost is `min-replicas-to-write`."""
    pool = unique_pool()
    no_lonely_master = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "10")
    with (
        SentinelSetup("redis-7.0", num_replicas=2, arguments=no_lonely_master) as setup,
        workers_of(setup.url, pool, tmp_path) as workers,
        Client(setup.url, pool=pool, retry_for_s=30) as client,
    ):
        for name in ("one", "two"):
            workers.start(name, step_s=0.02)
        readers = Readers(client)
        readers.read(ids("r", 8), num_tokens=150)
        eventually(lambda: readers.num_tokens > 80)
        with closing(setup.sentinels[0].client()) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", MASTER_NAME)
        readers.finish()
        assert setup.master_port() != setup.master.port


# ---- cluster ----


@pytest.fixture(scope="module", params=one_quick("valkey-9", "redis-7.0"))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(request.param) as cluster:
        yield cluster


def spread_pool(cluster: Cluster) -> str:
    """A pool whose partitions lie on different masters."""
    while True:
        pool = unique_pool()
        slots = [keys.slot for keys in Keyspace(pool=pool).partitions(PARTITIONS)]
        if len({cluster.number_of(slot) for slot in slots}) == PARTITIONS:
            return pool


def sharded_subscribers(cluster: Cluster, pool: str) -> list[int]:
    """On each node, the connections that hold on to one of its partitions."""
    counts = []
    for node in cluster.nodes:
        with closing(node.client()) as redis:
            channels = [keys.channel("") for keys in Keyspace(pool=pool).partitions(PARTITIONS)]
            reply = redis.execute_command("PUBSUB", "SHARDNUMSUB", *channels)
            counts.append(sum(reply[1::2]))
    return counts


def test_a_cluster_of_three_masters(cluster: Cluster, tmp_path: Path) -> None:
    pool = spread_pool(cluster)
    with (
        workers_of(cluster.url, pool, tmp_path) as workers,
        Client(cluster.url, pool=pool) as client,
    ):
        for name in ("one", "two"):
            workers.start(name, partitions=PARTITIONS)
        readers = Readers(client)
        readers.read(ids("r", 18), num_tokens=40)
        eventually(lambda: readers.num_tokens > 18)
        eventually(lambda: sharded_subscribers(cluster, pool) == [1, 1, 1])
        readers.finish()
        assert client._link._partitions.listeners()[0]._sharded
        check_every_call(client)
        prompts = [f"async {number}" for number in range(6)]
        answers = asyncio.run(generate_all(cluster.url, pool, prompts))
        assert answers == [expected_tokens(p.encode(), SEED, 20) for p in prompts]
        assert workers.processes[0].terminate() == 0


MOVES = {
    "at once": (move_slot_at_once, "valkey-9"),
    "key by key": (move_slot, "redis-7.0"),
    "key by key, valkey": (move_slot, "valkey-9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", MOVES)
def test_a_slot_moves_while_streams_run(how: str, tmp_path: Path) -> None:
    move, release = MOVES[how]
    with Cluster(release) as cluster, ExitStack() as stack:
        pool = spread_pool(cluster)
        workers = stack.enter_context(workers_of(cluster.url, pool, tmp_path))
        client = stack.enter_context(Client(cluster.url, pool=pool, retry_for_s=30))
        for name in ("one", "two"):
            workers.start(name, step_s=0.02, partitions=PARTITIONS)
        readers = Readers(client)
        readers.read(ids("r", 18), num_tokens=120)
        eventually(lambda: readers.num_tokens > 18 * 20)
        moved = Keyspace(pool=pool, partition=0)
        source = cluster.owner_of(moved.slot)
        target = next(node for node in cluster.nodes if node is not source)
        move(cluster, moved.slot, target)
        readers.read(ids("late", 9), num_tokens=20)  # some of them into the slot that moves
        until(lambda: cluster.owner_of(moved.slot) is target)
        readers.finish()

        assert all(worker.process.poll() is None for worker in workers.processes)
        assert [transcript.num_rewinds for transcript in readers.transcripts] == [0] * 27
        with closing(target.client()) as redis:
            counters = redis.hgetall(moved.counters)
        assert {int(count) for count in counters.values()} <= {0}


@pytest.mark.slow
def test_a_node_that_is_away_stops_only_its_own_partition(tmp_path: Path) -> None:
    with Cluster("valkey-9") as cluster, ExitStack() as stack:
        pool = spread_pool(cluster)
        workers = stack.enter_context(workers_of(cluster.url, pool, tmp_path))
        client = stack.enter_context(Client(cluster.url, pool=pool, retry_for_s=60))
        workers.start("one", step_s=0.02, partitions=PARTITIONS)
        readers = Readers(client)
        readers.read(ids("r", 18), num_tokens=120)
        eventually(lambda: readers.num_tokens > 18 * 20)
        doomed = Keyspace(pool=pool, partition=1)
        node = cluster.nodes[cluster.number_of(doomed.slot)]
        node.kill()
        elsewhere = [t for t in readers.transcripts if partition_of(t.request_id, PARTITIONS) != 1]
        eventually(lambda: all(t.is_complete for t in elsewhere))
        node.start()
        readers.finish()
        assert workers.processes[0].terminate() == 0


def test_a_script_is_refused_before_it_writes_while_its_slot_moves(cluster: Cluster) -> None:
    """From the first moment of the move on: Redis would refuse `finish` at its first key that does
    not exist, in the middle of its work."""
    keys = Keyspace(pool=spread_pool(cluster))
    source = cluster.owner_of(keys.slot)
    assert source is not None
    target = next(node for node in cluster.nodes if node is not source)
    with (
        connect(cluster.url, slot=keys.slot) as client,
        closing(source.client()) as old,
        closing(target.client()) as new,
    ):
        queue = Queue(client, keys, replace(POLICY, publish="SPUBLISH"))
        lease = queue.leased()
        assert queue.append(lease, 1, ev="start") == 1
        begin_move(cluster, keys.slot, target)
        before = old.hgetall(keys.owners), old.hgetall(keys.record("a")), old.xlen(keys.log("a"))
        for attempt in (lambda: queue.finish(lease, 2), lambda: queue.append(lease, 2), queue.tick):
            with pytest.raises(ResponseError) as refused:
                attempt()
            assert is_retryable(refused.value)
        after = old.hgetall(keys.owners), old.hgetall(keys.record("a")), old.xlen(keys.log("a"))
        assert after == before
        end_move(cluster, keys.slot, target)

        assert until(lambda: queue.finish(lease, 2)).status is FinishStatus.OK
        assert new.hgetall(keys.owners) == {}
