"""`tokenmill exporter`: the queue's numbers for Prometheus and for an autoscaler."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support_queue import POLICY, Queue
from support_servers import Server, binary_of, single
from support_worker_process import clean_environment, eventually
from tokenmill import Client
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import GROUP, Keyspace
from tokenmill_worker.endpoints import Route
from tokenmill_worker.exporter import Exporter, PoolReader

BODY = '{"prompt_token_ids":[1,2,3],"max_tokens":20}'
WORK = 23


@pytest.fixture
def queue(server: EmbeddedServer, keyspace: Keyspace) -> Iterator[Queue]:
    with Client(server.url, namespace=keyspace.namespace) as client:
        yield Queue(client._link.partitions()[0].redis, keyspace, POLICY)


@pytest.fixture
def routes_of(keyspace: Keyspace) -> Iterator[Callable[..., dict[str, Route]]]:
    clients = []

    def make(url: str, *, max_age_s: float = 0.0) -> dict[str, Route]:
        client = Client(url, namespace=keyspace.namespace, retry_for_s=0)
        clients.append(client)
        return Exporter(PoolReader(client, url, max_age_s), "default", 10.0).routes()

    yield make
    for client in clients:
        client.close()


def metrics_of(routes: dict[str, Route]) -> dict[tuple[str, ...], float]:
    """(name, values of the labels but pool's) → value."""
    _, body, content_type = routes["/metrics"]()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "pool")): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_the_queue_in_numbers(
    queue: Queue, server: EmbeddedServer, routes_of: Callable[..., dict[str, Route]]
) -> None:
    routes = routes_of(server.url)
    for number in range(3):  # the window has room for two
        queue.enqueue(f"n{number}", body=BODY)
    queue.enqueue("first", body=BODY, priority_class="0", tenant="other")
    queue.lease(count=1)  # one of each class
    facts = {"state": "ready", "slots": 8, "running": 2, "remaining_tokens": 40}
    queue.client.set(queue.keys.worker_card("w"), json.dumps(facts))

    found = metrics_of(routes)
    assert found["tokenmill_exporter_up",] == 1
    assert found["tokenmill_queue_waiting",] == 2
    assert found["tokenmill_queue_running",] == 2
    assert found["tokenmill_queue_requests", "normal", "ready"] == 2
    assert found["tokenmill_queue_requests", "high", "ready"] == 0
    assert found["tokenmill_queue_pending", "high"] == 1
    assert found["tokenmill_queue_lag", "normal"] == 2
    assert found["tokenmill_backlog_tokens", "waiting"] == 2 * WORK
    assert found["tokenmill_backlog_tokens", "running"] == 40
    assert found["tokenmill_backlog_seconds",] == pytest.approx((2 * WORK + 40) / 10.0)
    assert found["tokenmill_queue_workers", "ready"] == 1
    assert found["tokenmill_queue_workers", "draining"] == 0
    assert found["tokenmill_queue_places",] == 8
    status, body, _ = routes["/scaling"]()
    scaling = json.loads(body)
    assert status == 200
    assert scaling["backlog_tokens"] == 2 * WORK + 40
    assert scaling["backlog_seconds"] == pytest.approx(8.6)
    assert scaling["tokens_per_s_is_measured"] is False


def test_every_series_is_there_before_anything_happened(
    server: EmbeddedServer, routes_of: Callable[..., dict[str, Route]]
) -> None:
    found = metrics_of(routes_of(server.url))

    quiet = {name for name, *_ in found if not name.startswith("tokenmill_redis_memory")}
    quiet -= {"tokenmill_exporter_up", "tokenmill_exporter_read_seconds"}
    assert len(quiet) == 17
    assert {name: value for name, value in found.items() if name[0] in quiet and value} == {}


def test_a_paused_queue_asks_for_no_workers_but_those_that_compute(
    queue: Queue, server: EmbeddedServer, routes_of: Callable[..., dict[str, Route]]
) -> None:
    routes = routes_of(server.url)
    queue.leased("runs", body=BODY)
    queue.enqueue("waits", body=BODY)
    queue.run(queue.operator.set_pause("pause"))

    found = metrics_of(routes)
    assert found["tokenmill_queue_paused",] == 1
    assert found["tokenmill_queue_waiting",] == 1
    assert found["tokenmill_backlog_tokens", "waiting"] == 0
    assert found["tokenmill_backlog_tokens", "running"] == WORK
    assert found["tokenmill_backlog_deferred_tokens",] == WORK
    assert found["tokenmill_backlog_seconds",] == pytest.approx(WORK / 10.0)
    scaling = json.loads(routes["/scaling"]()[1])
    assert scaling["paused"] is True
    assert (scaling["backlog_tokens"], scaling["deferred_tokens"]) == (WORK, WORK)
    assert scaling["backlog_seconds"] == pytest.approx(WORK / 10.0)

    queue.run(queue.operator.set_pause("resume"))
    scaling = json.loads(routes["/scaling"]()[1])
    assert (scaling["paused"], scaling["backlog_tokens"]) == (False, 2 * WORK)


def test_a_request_for_tomorrow_wakes_nobody_today(
    queue: Queue, server: EmbeddedServer, routes_of: Callable[..., dict[str, Route]]
) -> None:
    routes = routes_of(server.url)
    queue.enqueue("tomorrow", body=BODY, delay_ms=86_400_000)

    scaling = json.loads(routes["/scaling"]()[1])
    assert (scaling["backlog_seconds"], scaling["oldest_s"]) == (0, 0)
    assert (scaling["waiting"], scaling["delayed"], scaling["deferred_tokens"]) == (1, 1, WORK)
    queue.client.zadd(queue.keys.delayed, {"tomorrow": queue.now_ms() - 1})
    assert json.loads(routes["/scaling"]()[1])["backlog_tokens"] == WORK


def test_redis_memory_is_what_redis_says(routes_of: Callable[..., dict[str, Route]]) -> None:
    with single("valkey-9", "--maxmemory", "123mb") as server:
        found = metrics_of(routes_of(server.url))
        with closing(server.client()) as client:
            used = client.info("memory")["used_memory"]
    assert found["tokenmill_redis_memory_max_bytes",] == 123 * 2**20
    # Connections come and go between the two looks.
    assert found["tokenmill_redis_memory_used_bytes",] == pytest.approx(used, rel=0.5)
    assert found["tokenmill_queue_memory_pressure",] == 0


def test_without_the_right_to_info_the_queue_is_told_all_the_same(
    routes_of: Callable[..., dict[str, Route]],
) -> None:
    with single("valkey-9") as server:
        with closing(server.client()) as admin:
            admin.execute_command("ACL", "SETUSER", "blind", "on", ">x", "~*", "+@all", "-info")
        found = metrics_of(routes_of(f"redis://blind:x@127.0.0.1:{server.port}/0"))
    assert found["tokenmill_exporter_up",] == 1
    assert not [name for name, *_ in found if name.startswith("tokenmill_redis")]


def test_a_redis_that_is_away_is_no_empty_queue(
    routes_of: Callable[..., dict[str, Route]],
) -> None:
    with Server(binary_of("valkey-9")) as server:
        routes = routes_of(server.url)
        assert routes["/readyz"]()[0] == 200
        server.kill()
        found = metrics_of(routes)
        assert found["tokenmill_exporter_up",] == 0
        assert not [name for name, *_ in found if name.startswith("tokenmill_queue")]
        assert not [name for name, *_ in found if name.startswith("tokenmill_backlog")]
        for path in ("/scaling", "/readyz"):
            assert routes[path]()[0] == 503
        assert routes["/healthz"]()[0] == 200
        server.start()
        eventually(lambda: routes["/readyz"]()[0] == 200)


def test_within_its_age_a_reading_serves_all(
    queue: Queue, server: EmbeddedServer, routes_of: Callable[..., dict[str, Route]]
) -> None:
    routes = routes_of(server.url, max_age_s=3600)
    assert json.loads(routes["/scaling"]()[1])["waiting"] == 0
    queue.enqueue("a", body=BODY)
    assert json.loads(routes["/scaling"]()[1])["waiting"] == 0
    assert json.loads(routes_of(server.url)["/scaling"]()[1])["waiting"] == 1


def test_the_command(server: EmbeddedServer, queue: Queue, tmp_path: Path) -> None:
    """A process without torch, on a port of its own."""
    queue.enqueue("a", body=BODY)
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "tokenmill", "exporter", "--port", "0",
                "--log-format", "json", "--namespace", queue.keys.namespace,
            ],
            env=clean_environment() | {"TOKENMILL_REDIS_URL": server.url},
            stderr=stderr,
        )  # fmt: skip
    try:
        line = json.loads(eventually(lambda: log.read_text().partition("\n")[0]))
        assert line["message"] == "exporter ready"
        with urlopen(f"http://{line['address']}/scaling?queue=default") as response:
            assert json.load(response)["waiting"] == 1
        with urlopen(f"http://{line['address']}/metrics") as response:
            assert b"tokenmill_queue_waiting{" in response.read()
        with pytest.raises(HTTPError) as missing:
            urlopen(f"http://{line['address']}/")
        missing.value.close()
    finally:
        process.terminate()
    assert process.wait(timeout=20) == 0


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, tokenmill_worker.commands.exporter; "
        "print([m for m in ('torch', 'transformers', 'tokenmill_engine') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_role_metrics_is_enough(
    keyspace: Keyspace, routes_of: Callable[..., dict[str, Route]], tmp_path: Path
) -> None:
    """With the ACL file of deploy/, for this test's namespace."""
    acl = Path(__file__).resolve().parents[2] / "deploy" / "redis" / "users.acl"
    text = acl.read_text().replace("tokenmill:", f"{keyspace.namespace}:")
    file = tmp_path / "users.acl"
    file.write_text(re.sub(r"^user (\w+) on", r"user \1 on >secret", text, flags=re.M))
    with single("valkey-9", "--aclfile", str(file)) as server:
        at = f"127.0.0.1:{server.port}/0"
        with closing(server.client(username="admin", password="secret")) as admin:
            queue = Queue(admin, keyspace, POLICY)
            queue.client.xadd(queue.keys.ready("1"), {"id": "plain", "body": BODY})
            queue.enqueue("a", body=BODY)
            queue.enqueue("later", body=BODY, delay_ms=60_000)
            queue.enqueue("later", body=BODY, delay_ms=60_000)
            admin.set(queue.keys.worker_card("w"), json.dumps({"state": "ready"}))
            admin.xgroup_createconsumer(queue.keys.ready("r"), GROUP, "w")
        found = metrics_of(routes_of(f"redis://metrics:secret@{at}"))
    assert found["tokenmill_exporter_up",] == 1
    assert found["tokenmill_queue_waiting",] == 3
    assert found["tokenmill_queue_delayed",] == 1
    assert found["tokenmill_backlog_tokens", "waiting"] == 2 * WORK
    assert found["tokenmill_queue_workers", "ready"] == 1
    assert found["tokenmill_redis_memory_used_bytes",] > 0
