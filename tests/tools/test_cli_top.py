"""`tokenmill top`: one look, its JSON, and live in a real terminal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from support_queue import Queue
from support_worker_process import clean_environment, eventually, pool_of_workers
from tokenmill._redis import connect
from tokenmill.calls import QueuePolicy
from tokenmill.cli.app import tokenmill
from tokenmill.cli.top_view import bar, curve
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace

CARD = {
    "id": "gpu1-7-ab", "state": "ready", "model": "m", "slots": 8, "running": 6,
    "kv_usage": 0.5, "generated_per_s": 120.5,
}  # fmt: skip


@pytest.fixture
def queue(server: EmbeddedServer, keyspace: Keyspace) -> Iterator[Queue]:
    with connect(server.url) as client:
        yield Queue(client, keyspace, QueuePolicy(window=2))


def top(server: EmbeddedServer, keys: Keyspace, *arguments: str) -> Result:
    options = ["--redis-url", server.url, "--namespace", keys.namespace, "top", *arguments]
    return CliRunner().invoke(tokenmill, options, env={"COLUMNS": "120"})


def test_one_look(server: EmbeddedServer, queue: Queue) -> None:
    for number in range(3):
        queue.enqueue(f"a{number}", tenant="acme")
    queue.enqueue("b", tenant="other", priority_class="2")
    queue.client.set(queue.keys.worker_card("gpu1-7-ab"), json.dumps(CARD))
    queue.client.hset(queue.keys.maintenance, "rate", "1.25")

    shown = top(server, queue.keys, "--once").stdout
    said = json.loads(top(server, queue.keys, "--once", "--json").stdout)

    assert "4 queued (oldest " in shown
    assert "0 running of 8 · 120 tokens/s · 1.2 requests/s end · 0 delayed · 0 dead" in shown
    rows = {cells[0]: cells[1:] for line in shown.splitlines() if (cells := _cells(line))}
    assert rows["gpu1-7-ab"] == [
        "ready", "████████░░   6/8", "█████░░░░░  50%", "120", "m",
    ]  # fmt: skip
    assert rows["normal"][:2] == ["2", "1"]
    assert (rows["acme"], rows["other"]) == (["3"], ["1"])
    assert (said["queued"], said["generated_per_s"], said["ends_per_s"]) == (4, 120.5, 1.25)
    assert said["workers"] == [CARD]
    assert said["is_paused"] is False


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃ ").split("│")] if "│" in line else []


def test_cards_of_other_releases_do_no_harm(server: EmbeddedServer, queue: Queue) -> None:
    for number, card in enumerate(({}, {"state": "ready", "slots": "many", "kv_usage": None})):
        queue.client.set(queue.keys.worker_card(f"w{number}"), json.dumps(card))

    shown = top(server, queue.keys, "--once")

    assert shown.exit_code == 0
    assert "w0" in shown.stdout
    assert "0/0" in shown.stdout


def test_without_a_worker_it_says_so(server: EmbeddedServer, keyspace: Keyspace) -> None:
    assert "no worker is alive" in top(server, keyspace, "--once").stdout
    assert top(server, keyspace, "--json").exit_code == 2


def test_curves_and_gauges() -> None:
    assert curve([0, 1, 2, 4, 8]) == "▁▂▃▅█"
    assert curve([0, 0]) == "▁▁"
    assert [bar(share) for share in (-1, 0, 0.5, 1, 7)] == [
        "░" * 10, "░" * 10, "█████░░░░░", "█" * 10, "█" * 10,
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_live_in_a_terminal(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> None:
    """In a real terminal, beside a worker process under load; Ctrl-C ends it in order."""
    socket, ended = f"tokenmill-{uuid.uuid4().hex}", tmp_path / "status"
    command = (
        f"{sys.executable} -m tokenmill --redis-url {server.url} --namespace {keyspace.namespace} "
        f"top --every-s 0.2; echo $? > {ended}"
    )

    def tmux(*arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-L", socket, *arguments],
            env=clean_environment(), check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    with pool_of_workers(server, keyspace, tmp_path) as pool:
        pool.start_ready("one", lease_ms=400, heartbeat_ms=100)
        for number in range(12):
            pool.submit(f"r{number}", max_tokens=4000)
        tmux("new-session", "-d", "-x", "120", "-y", "40", command)
        try:
            eventually(lambda: "8 running of 8" in tmux("capture-pane", "-p"))
            screen = eventually(lambda: _generating(tmux("capture-pane", "-p")))
            tmux("send-keys", "C-c")
            eventually(ended.exists)
        finally:
            subprocess.run(["tmux", "-L", socket, "kill-server"], check=False, capture_output=True)

    assert "4 queued (oldest " in screen
    assert "██████████" in screen
    assert "one-" in screen
    assert eventually(ended.read_text).strip() == "130"


def _generating(screen: str) -> str | None:
    """A screen whose worker has told a speed."""
    return screen if "tokens/s" in screen and " 0 tokens/s" not in screen else None
