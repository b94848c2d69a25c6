"""`tokenmill queue pause`, `resume`, `purge` and `move`, in one and in several partitions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from support_queue import Queue
from support_worker_process import eventually, pool_of_workers
from tokenmill import Client, RequestCancelled
from tokenmill._redis import connect
from tokenmill.calls import QueuePolicy
from tokenmill.cli.app import tokenmill
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import PARTITIONS_FIELD, Keyspace, partition_of


class Pool:
    """The command line, and a queue in every partition of one pool."""

    def __init__(self, client: redis.Redis, keys: Keyspace, url: str, partitions: int) -> None:
        self._options = ["--redis-url", url, "--namespace", keys.namespace]
        client.hset(keys.meta, PARTITIONS_FIELD, partitions)
        policy = QueuePolicy(window=2)
        self.queues = [Queue(client, each, policy) for each in keys.partitions(partitions)]

    def run(self, *arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(tokenmill, [*self._options, *arguments], input=input)

    def of(self, request_id: str) -> Queue:
        return self.queues[partition_of(request_id, len(self.queues))]

    def enqueue(self, count: int, tenant: str, priority_class: str = "1") -> list[str]:
        ids = [f"{tenant}-{priority_class}-{number}" for number in range(count)]
        for request_id in ids:
            self.of(request_id).enqueue(request_id, tenant=tenant, priority_class=priority_class)
        return ids

    def states(self, ids: list[str]) -> set[str]:
        return {self.of(request_id).record(request_id).state for request_id in ids}

    def classes(self, ids: list[str]) -> set[str]:
        return {self.of(request_id).record(request_id).priority_class for request_id in ids}


@pytest.fixture(params=[1, 3])
def pool(
    server: EmbeddedServer, keyspace: Keyspace, request: pytest.FixtureRequest
) -> Iterator[Pool]:
    with connect(server.url) as client:
        yield Pool(client, keyspace, server.url, request.param)


def test_pause_and_resume(pool: Pool) -> None:
    ids = pool.enqueue(4, "a")
    assert pool.run("queue", "resume").stdout == "pool default was not paused\n"
    paused = pool.run("queue", "pause")
    assert paused.stdout == "pool default is paused until `tokenmill queue resume`\n"
    assert "PAUSED for " in pool.run("queue").stdout
    assert json.loads(pool.run("queue", "--json").stdout)["is_paused"] is True
    assert "an operator has paused this pool" in pool.run("doctor", "--no-machine").stdout
    assert "an operator has paused the queue" in pool.run("explain", ids[0]).stdout
    assert [queue.lease() for queue in pool.queues] == [[]] * len(pool.queues)
    assert pool.run("queue", "resume").stdout == "pool default goes on\n"
    assert json.loads(pool.run("queue", "--json").stdout)["is_paused"] is False
    assert sum(len(queue.lease()) for queue in pool.queues) > 0


def test_a_pause_may_end_by_itself(pool: Pool) -> None:
    pool.run("queue", "pause", "--for-s", "3600")
    for queue in pool.queues:
        assert 3_590_000 < queue.client.pttl(queue.keys.pause) <= 3_600_000
    pool.run("queue", "pause")
    assert [queue.client.pttl(queue.keys.pause) for queue in pool.queues] == [-1] * len(pool.queues)


def test_purge_cancels_what_waits_and_only_what_was_meant(pool: Pool) -> None:
    running = pool.enqueue(1, "run")
    assert [lease.request_id for queue in pool.queues for lease in queue.lease()] == running
    low, normal = pool.enqueue(5, "a", "2"), pool.enqueue(5, "a", "1")
    other = pool.enqueue(2, "b", "2")

    refused = pool.run("queue", "purge", "--tenant", "a", "--priority", "low", input="n\n")
    assert (refused.exit_code, "Cancel 5 waiting requests?" in refused.stderr) == (1, True)
    done = pool.run("queue", "purge", "--tenant", "a", "--priority", "low", input="y\n")
    assert done.stdout.endswith("5 cancelled\n")
    assert pool.states(low) == {"cancelled"}
    assert pool.states(normal) | pool.states(other) <= {"queued", "held"}
    assert pool.of(low[0]).end(low[0]).message == "purged by an operator"

    assert pool.run("queue", "purge", "--older-than-s", "3600", "--yes").stdout == "0 cancelled\n"
    assert pool.run("queue", "purge", "--all", "--yes").stdout == "7 cancelled\n"
    assert pool.states(running) == {"leased"}


def test_purge_wants_to_know_which(pool: Pool) -> None:
    for arguments in ((), ("--all", "--tenant", "a")):
        assert pool.run("queue", "purge", *arguments).exit_code == 2
    assert pool.run("queue", "purge", "--tenant", "not a tenant").exit_code == 2


def test_move_by_name_and_by_choice(pool: Pool) -> None:
    named, chosen = pool.enqueue(4, "a", "2"), pool.enqueue(6, "b", "2")
    rest = pool.enqueue(3, "c", "2")

    moved = pool.run("queue", "move", "--to", "high", *named)
    again = pool.run("queue", "move", "--to", "high", *named)
    by_choice = pool.run("queue", "move", "--to", "normal", "--tenant", "b")

    assert moved.stdout == "4 moved, 0 had priority high before\n"
    assert again.stdout == "0 moved, 4 had priority high before\n"
    assert by_choice.stdout == "6 moved, 0 had priority normal before\n"
    assert [pool.classes(ids) for ids in (named, chosen, rest)] == [{"0"}, {"1"}, {"2"}]
    assert "an operator gave it priority high" in pool.run("explain", named[0]).stdout
    missing = pool.run("queue", "move", "--to", "high", "nobody")
    assert (missing.exit_code, missing.stderr[:18]) == (1, "Error: 1 not moved")
    assert pool.run("queue", "move", "--to", "high").exit_code == 2


def test_workers_obey_a_pause(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> None:
    """Real workers, idle and busy: what runs ends, nothing new starts, and nothing is lost."""
    options = ["--redis-url", server.url, "--namespace", keyspace.namespace]
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        pool.start_ready("one", max_num_seqs=2, step_s=0.002)
        pool.start_ready("idle", max_num_seqs=2, step_s=0.002)
        for number in range(3):
            pool.submit(f"before-{number}", max_tokens=120)
        eventually(lambda: [pool.state(f"before-{n}") for n in range(3)] == ["leased"] * 3)
        assert CliRunner().invoke(tokenmill, [*options, "queue", "pause"]).exit_code == 0
        for number in range(6):
            pool.submit(f"after-{number}", max_tokens=5)
        for number in range(3):
            pool.check_transcript(f"before-{number}", "hello", 7, 120)
        attempts = [pool.client.hget(keyspace.record(f"after-{n}"), "attempts") for n in range(6)]
        assert attempts == ["0"] * 6
        with Client(server.url, namespace=keyspace.namespace) as client:
            client.cancel("after-5")
            with pytest.raises(RequestCancelled):
                client.result("after-5")
        assert CliRunner().invoke(tokenmill, [*options, "queue", "resume"]).exit_code == 0
        for number in range(5):
            pool.check_transcript(f"after-{number}", "hello", 7, 5)
        eventually(pool.is_clean)
