"""`tokenmill doctor` against real servers: a healthy one, and faults planted one by one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from chaos.proxy import Proxy
from support_queue import Queue
from support_redis import unique_keyspace
from support_servers import Server, single, until
from tokenmill._redis import connect
from tokenmill.calls import QueuePolicy
from tokenmill.cli.app import tokenmill
from tokenmill.cli.doctor import way_checks
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import GROUP, PROTOCOL_FIELD, Keyspace

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "redis"
FIT = ("--appendonly", "yes", "--maxmemory", "1gb", "--maxmemory-policy", "noeviction")


class Clinic:
    """A server, a pool on it with one ready worker, and the doctor."""

    def __init__(self, client: redis.Redis, url: str, keys: Keyspace) -> None:
        self.client, self.url, self.keys = client, url, keys
        self.queue = Queue(client, keys, QueuePolicy())
        self.show_card("w1")
        self.tick()

    def tick(self) -> None:
        self.queue.tick()

    def show_card(self, name: str, **facts: object) -> None:
        card = {"id": name, "state": "ready", "model": "m", "versions": {"tokenmill": "1"}}
        self.client.set(self.keys.worker_card(name), json.dumps({**card, **facts}), px=60_000)

    def run(self, *arguments: str, url: str | None = None) -> Result:
        """`url` may hold a password, so it is passed on by the environment."""
        return CliRunner().invoke(
            tokenmill,
            ["--namespace", self.keys.namespace, "doctor", *arguments],
            env={"TOKENMILL_REDIS_URL": url or self.url},
        )

    def examine(self, url: str | None = None) -> tuple[int, list[dict[str, Any]]]:
        done = self.run("--no-machine", "--json", url=url)
        assert done.stderr == ""
        return done.exit_code, json.loads(done.stdout)["findings"]

    def findings(self) -> dict[str, str]:
        """Check → severity, without what is only to be known."""
        _, found = self.examine()
        return {each["check"]: each["severity"] for each in found if each["severity"] != "note"}


@pytest.fixture(scope="module")
def fit_server() -> Iterator[Server]:
    with single("valkey-9", *FIT) as server:
        yield server


@pytest.fixture
def clinic(fit_server: Server) -> Iterator[Clinic]:
    with connect(fit_server.url) as client:
        yield Clinic(client, fit_server.url, unique_keyspace())


@contextmanager
def clinic_on(*arguments: str) -> Iterator[Clinic]:
    """On a server of its own."""
    with single("valkey-9", *arguments) as server, connect(server.url) as client:
        yield Clinic(client, server.url, unique_keyspace())


def test_a_healthy_pool_has_no_findings_and_nothing_changes(clinic: Clinic) -> None:
    clinic.queue.leased("a")
    clinic.queue.enqueue("b")
    before = sorted(clinic.client.keys(f"{clinic.keys.namespace}*"))

    assert clinic.examine() == (0, [])
    assert sorted(clinic.client.keys(f"{clinic.keys.namespace}*")) == before


def test_findings_say_what_was_seen_and_what_to_do(clinic: Clinic) -> None:
    clinic.client.delete(clinic.keys.worker_card("w1"))
    clinic.queue.enqueue("a")

    done = clinic.run("--no-machine")

    assert done.exit_code == 2
    first, seen, do, last = done.stdout.splitlines()
    assert first == "error    workers: requests wait and no worker is alive in this pool"
    assert seen.strip() == "seen: worker cards: 0 (none); 1 queued, 0 running"
    assert do.strip().startswith("do:   start one with `tokenmill worker`")
    assert last.startswith("1 error; looked at: rights, latency, clock, fitness")


# Faults of the server, each on one of its own


@pytest.mark.parametrize(
    ("arguments", "check", "severity"),
    [
        (("--appendonly", "yes", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"),
         "eviction", "error"),
        (("--appendonly", "no", "--maxmemory", "1gb"), "persistence", "warning"),
        ((*FIT, "--maxclients", "6"), "connections", "warning"),
    ],
)  # fmt: skip
def test_a_server_with_wrong_settings(
    arguments: tuple[str, ...], check: str, severity: str
) -> None:
    with clinic_on(*arguments) as clinic, ExitStack() as stack:
        if check == "connections":
            for _ in range(3):
                idle = stack.enter_context(connect(clinic.url))
                idle.ping()
        assert clinic.findings() == {check: severity}


def settled_memory(client: redis.Redis) -> int | None:
    """Once the buffers of a large write are gone."""
    used = int(client.info("memory")["used_memory"])
    return used if used < 40_000_000 else None


def test_a_server_whose_memory_is_nearly_full() -> None:
    with clinic_on(*FIT) as clinic:
        clinic.client.set("other", b"x" * 32_000_000)  # beside it, connections weigh nothing
        used = until(lambda: settled_memory(clinic.client))
        for share, found in ((0.5, {}), (0.78, {"memory": "warning"}), (0.93, {"memory": "error"})):
            clinic.client.config_set("maxmemory", int(used / share))
            assert clinic.findings() == found, f"{share:.0%} of {used}"


def test_a_server_without_a_memory_limit_is_only_noted() -> None:
    with clinic_on("--appendonly", "yes") as clinic:
        status, found = clinic.examine()
    assert status == 0
    assert [(each["check"], each["severity"]) for each in found] == [("memory", "note")]


def test_a_server_that_cannot_write_to_its_disk() -> None:
    with single("valkey-9", *FIT) as server, connect(server.url) as client:
        clinic = Clinic(client, server.url, unique_keyspace())
        (server.folder / "dump.rdb" / "in the way").mkdir(parents=True)
        client.bgsave()
        until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        assert clinic.findings() == {"redis-disk": "error"}


@pytest.mark.slow
def test_a_replica() -> None:
    with single("valkey-9", *FIT) as master, single("valkey-9", *FIT) as replica:
        with connect(master.url) as client:
            clinic = Clinic(client, master.url, unique_keyspace())
        with replica.client() as client:
            client.replicaof("127.0.0.1", str(master.port))
            until(lambda: client.info("replication")["master_link_status"] == "up")
        # Our own connections look for a master, so the doctor is told that there is none.
        status, found = clinic.examine(replica.url)
    assert status == 2
    assert "replica" in " ".join(each["problem"] + each["evidence"] for each in found)


def test_no_server(clinic: Clinic) -> None:
    status, found = clinic.examine("redis://127.0.0.1:1/0")
    assert status == 2
    assert [each["check"] for each in found] == ["connection"]


def test_a_user_with_too_few_rights(tmp_path: Path) -> None:
    lines = (DEPLOY / "users.acl").read_text()
    lines = re.sub(r"^user (\w+) on", r"user \1 on >secret", lines, flags=re.M)
    lines = lines.replace("tokenmill:", "*:")
    crippled = lines.replace("user producer ", "user crippled ").replace(" +hincrby ", " ")
    (tmp_path / "users.acl").write_text(
        lines + "".join(line + "\n" for line in crippled.splitlines() if "crippled" in line)
    )
    with single("valkey-9", *FIT, "--aclfile", str(tmp_path / "users.acl")) as server:
        client = server.client(username="admin", password="secret")
        with closing(client):
            clinic = Clinic(client, server.url, unique_keyspace())
            by_role = {
                role: clinic.examine(f"redis://{role}:secret@127.0.0.1:{server.port}/0")
                for role in ("admin", "producer", "worker", "crippled")
            }
    errors = {
        role: [each for each in found if each["severity"] == "error"]
        for role, (_, found) in by_role.items()
    }
    assert [errors[role] for role in ("admin", "producer", "worker")] == [[], [], []]
    (finding,) = errors["crippled"]
    assert (finding["check"], by_role["crippled"][0]) == ("acl", 2)
    assert finding["evidence"].endswith("refused: hincrby")


# Faults of the way


def test_a_server_that_answers_slowly(clinic: Clinic) -> None:
    with Proxy(clinic.url, delay_s=0.01) as far_away:
        _, found = clinic.examine(far_away.url)
    (finding,) = [each for each in found if each["check"] == "latency"]
    median_ms = float(re.findall(r"median ([\d.]+) ms", finding["evidence"])[0])
    assert median_ms >= 10


def test_a_clock_that_is_wrong(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_checks.time, "time", lambda real=time.time: real() + 90)
    _, found = clinic.examine()
    (finding,) = [each for each in found if each["check"] == "clock"]
    assert finding["evidence"] == "TIME: Redis is 90.0 s behind"


# Faults of the queue, on a server that is fit


def no_worker(clinic: Clinic) -> None:
    clinic.client.delete(clinic.keys.worker_card("w1"))


def nobody_ready(clinic: Clinic) -> None:
    clinic.show_card("w1", state="loading")


def two_models(clinic: Clinic) -> None:
    clinic.show_card("w2", model="another")


def other_protocol(clinic: Clinic) -> None:
    clinic.client.hset(clinic.keys.meta, PROTOCOL_FIELD, "99")


def nobody_ticks(clinic: Clinic) -> None:
    clinic.client.hset(clinic.keys.maintenance, "last", clinic.queue.now_ms() - 120_000)


def wrong_lag(clinic: Clinic) -> None:
    """The entry that was delivered last is deleted while an older one is pending."""
    for number in range(3):
        clinic.queue.enqueue(f"a{number}", tenant=f"t{number}")
        clinic.queue.await_next_ms()
    _, last = clinic.queue.lease(count=2)
    clinic.queue.finish(last, 1)


def lost_lease(clinic: Clinic) -> None:
    clinic.queue.leased("a")
    clinic.queue.lose_worker()


def dead_letter(clinic: Clinic) -> None:
    lease = clinic.queue.leased("a")
    clinic.queue.append(lease, 1, ev="start", i=0)
    clinic.queue.lose_worker()
    assert clinic.queue.tick(max_strikes=1).dead == 1


def long_wait(clinic: Clinic) -> None:
    old_ms = clinic.queue.now_ms() - 300_000
    clinic.client.xadd(clinic.keys.ready("1"), {"id": "a", "body": "{}"}, id=f"{old_ms}-0")


def unserved_partition(clinic: Clinic) -> None:
    clinic.client.hset(clinic.keys.meta, "partitions", 2)


def full_queue(clinic: Clinic) -> None:
    clinic.client.hset(clinic.keys.counters, "queued", 9000)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (no_worker, {"workers": "warning"}),
        (nobody_ready, {"workers": "warning"}),
        (two_models, {"models": "error"}),
        (other_protocol, {"protocol": "error"}),
        (nobody_ticks, {"maintenance": "error"}),
        (wrong_lag, {"lag": "warning"}),
        (lost_lease, {"leases": "error"}),
        (dead_letter, {"dead-letters": "warning"}),
        (long_wait, {"backlog": "warning"}),
        (unserved_partition, {"partitions": "error"}),
        (full_queue, {"queue-room": "warning"}),
    ],
)
def test_a_planted_fault_is_found_and_nothing_else(
    clinic: Clinic, plant: Callable[[Clinic], None], found: dict[str, str]
) -> None:
    plant(clinic)
    assert clinic.findings() == found


def test_a_plain_server_of_the_tests(server: EmbeddedServer, keyspace: Keyspace) -> None:
    """On a socket, without persistence: it is told, and the machine's checks run as well."""
    options = ["--redis-url", server.url, "--namespace", keyspace.namespace]
    done = CliRunner().invoke(tokenmill, [*options, "doctor", "--json"])

    said = json.loads(done.stdout)
    assert "machine" in said["looked_at"]
    assert GROUP not in {each["check"] for each in said["findings"]}
    assert "persistence" in {each["check"] for each in said["findings"]}
