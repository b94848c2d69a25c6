"""`tokenmill dlq` and `tokenmill tenant` on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import redis
from click.testing import CliRunner, Result

from support_queue import Queue
from tokenmill._redis import connect
from tokenmill.calls import QueuePolicy
from tokenmill.cli.app import tokenmill
from tokenmill.cli.tables import age
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import PARTITIONS_FIELD, Keyspace, partition_of

BODY = '{"prompt": "s3cret"}'


class Pool:
    """The command line, and a queue in every partition of one pool."""

    def __init__(self, client: redis.Redis, keys: Keyspace, url: str, partitions: int) -> None:
        self._options = ["--redis-url", url, "--namespace", keys.namespace]
        client.hset(keys.meta, PARTITIONS_FIELD, partitions)
        self.queues = [Queue(client, each, QueuePolicy()) for each in keys.partitions(partitions)]

    def run(self, *arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(tokenmill, [*self._options, *arguments], input=input)

    def queue_of(self, request_id: str) -> Queue:
        return self.queues[partition_of(request_id, len(self.queues))]

    def die(self, request_id: str, tenant: str = "default") -> None:
        queue = self.queue_of(request_id)
        lease = queue.leased(request_id, body=BODY, tenant=tenant)
        queue.append(lease, 1, ev="start", i=0)
        queue.lose_worker()
        assert queue.tick(max_strikes=1).dead == 1


@pytest.fixture(params=[1, 3])
def pool(
    server: EmbeddedServer, keyspace: Keyspace, request: pytest.FixtureRequest
) -> Iterator[Pool]:
    with connect(server.url) as client:
        yield Pool(client, keyspace, server.url, request.param)


def test_dead_letters_are_listed_the_latest_first(pool: Pool) -> None:
    assert pool.run("dlq", "list").stdout == "no dead letters\n"
    for number in range(4):
        pool.die(f"dead-{number}", tenant="acme")
        pool.queue_of(f"dead-{number}").await_next_ms()

    found = json.loads(pool.run("dlq", "list", "--json").stdout)
    table = pool.run("dlq", "list", "--limit", "2").stdout

    assert [letter["id"] for letter in found] == ["dead-3", "dead-2", "dead-1", "dead-0"]
    assert (found[0]["why"], found[0]["tenant"], found[0]["attempts"]) == (
        "worker_crash", "acme", 1,
    )  # fmt: skip
    assert "dead-3" in table
    assert "dead-1" not in table
    assert "s3cret" not in table + json.dumps(found)


def test_a_dead_letter_is_shown_with_its_past_and_without_its_prompt(pool: Pool) -> None:
    pool.die("dead-0")

    said = pool.run("dlq", "show", "dead-0").stdout
    details = json.loads(pool.run("dlq", "show", "dead-0", "--json").stdout)
    body = pool.run("dlq", "show", "dead-0", "--body").stdout

    assert said.startswith("worker_crash after 1 attempts, ")
    assert "can be queued again" in said
    assert said.splitlines()[-1].endswith("ended: dead (worker_crash)")
    assert details["can_be_queued_again"] is True
    assert details["explanation"]["status"]["state"] == "dead"
    assert "s3cret" not in said + json.dumps(details)
    assert body == BODY + "\n"


def test_a_letter_outlives_its_request(pool: Pool) -> None:
    pool.die("dead-0")
    queue = pool.queue_of("dead-0")
    queue.client.delete(queue.keys.record("dead-0"))

    said = pool.run("dlq", "show", "dead-0")

    assert said.exit_code == 0
    assert "its body was not kept" in said.stdout
    assert pool.run("dlq", "show", "dead-0", "--body").exit_code == 1
    assert pool.run("dlq", "requeue", "dead-0").exit_code == 1
    assert "no dead letter" in pool.run("dlq", "show", "dead-9").stderr


def test_dead_requests_get_another_life(pool: Pool) -> None:
    for number in range(3):
        pool.die(f"dead-{number}")

    one = pool.run("dlq", "requeue", "dead-1")
    again = pool.run("dlq", "requeue", "dead-1")
    everything = pool.run("dlq", "requeue", "--all")

    assert (one.exit_code, one.stdout) == (0, "dead-1 queued again\n")
    assert (again.exit_code, again.stdout) == (1, "dead-1 it is not dead\n")
    assert sorted(everything.stdout.splitlines()) == ["dead-0 queued again", "dead-2 queued again"]
    assert {pool.queue_of(f"dead-{n}").record(f"dead-{n}").state for n in range(3)} == {"queued"}
    nothing = pool.run("dlq", "requeue", "--all")
    assert (nothing.exit_code, nothing.stdout) == (0, "no dead letters\n")
    assert json.loads(pool.run("dlq", "list", "--json").stdout) == []


@pytest.mark.parametrize(
    ("answer", "arguments", "left"),
    [("n\n", [], 3), ("y\n", [], 0), (None, ["--yes"], 0), ("", [], 3)],
)
def test_purging_asks_first(
    pool: Pool, answer: str | None, arguments: list[str], left: int
) -> None:
    for number in range(3):
        pool.die(f"dead-{number}")

    done = pool.run("dlq", "purge", "--all", *arguments, input=answer)

    assert len(json.loads(pool.run("dlq", "list", "--json").stdout)) == left
    assert done.exit_code == (1 if left else 0)
    queue = pool.queue_of("dead-0")
    assert queue.client.exists(queue.keys.record("dead-0")) == (1 if left else 0)


def test_purging_by_id_leaves_the_others(pool: Pool) -> None:
    for number in range(3):
        pool.die(f"dead-{number}")

    done = pool.run("dlq", "purge", "dead-1", "dead-7", "--yes")

    assert done.stdout == "1 forgotten\n"
    assert (done.exit_code, done.stderr) == (1, "Error: no dead letter of dead-7\n")
    ids = {letter["id"] for letter in json.loads(pool.run("dlq", "list", "--json").stdout)}
    assert ids == {"dead-0", "dead-2"}


@pytest.mark.parametrize("command", ["requeue", "purge"])
def test_either_ids_or_all(pool: Pool, command: str) -> None:
    for arguments in ([], ["dead-1", "--all"]):
        assert pool.run("dlq", command, *arguments).exit_code == 2


def test_weights_hold_in_every_partition(pool: Pool) -> None:
    assert pool.run("tenant", "weight", "acme").stdout == "1\n"
    assert pool.run("tenant", "weight", "acme", "4").stdout == "acme: 4, was 1\n"
    assert pool.run("tenant", "weight", "acme").stdout == "4\n"
    for queue in pool.queues:
        (share,) = queue.run(queue.operator.tenants())
        assert (share.tenant, share.weight) == ("acme", 4)
    for wrong in (["acme", "0"], ["acme", "101"], ["a:b", "2"]):
        assert pool.run("tenant", "weight", *wrong).exit_code == 2


def test_tenants_are_listed_with_what_waits_in_all_partitions(pool: Pool) -> None:
    assert "no tenant" in pool.run("tenant", "list").stdout
    pool.run("tenant", "weight", "acme", "2")
    for number in range(6):
        name = f"request-{number}"
        pool.queue_of(name).enqueue(name, tenant="acme" if number % 2 else "other")

    shares = json.loads(pool.run("tenant", "list", "--json").stdout)
    table = pool.run("tenant", "list").stdout

    assert shares == [
        {"tenant": "acme", "weight": 2, "queued": 3},
        {"tenant": "other", "weight": 1, "queued": 3},
    ]
    assert "acme" in table


def test_ages_have_the_unit_that_fits() -> None:
    seconds = [None, 0.26, 119, 600, 7_200, 172_800]
    assert [age(each) for each in seconds] == [
        "–", "0.3 s", "119.0 s", "10.0 min", "2.0 h", "2.0 d",
    ]  # fmt: skip
