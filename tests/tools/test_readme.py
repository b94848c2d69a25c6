"""The README's producers work as they are printed, but for the address of the server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_waiting import wait_until
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.testing import FakeWorker

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "There was a mill that ground tokens."


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """With a worker in the default pool."""
    with (
        EmbeddedServer() as server,
        connect(server.url) as connection,
        FakeWorker(connection, lambda _: ANSWER),
    ):
        yield server


def test_the_python_producer(server: EmbeddedServer) -> None:
    source = blocks("python")[0]
    assert len(source.strip().splitlines()) <= 10
    done = subprocess.run(
        [sys.executable, "-c", source.replace("redis://localhost:6379/0", server.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(ANSWER) == 2


def test_the_redis_cli_producer(server: EmbeddedServer) -> None:
    """Its commands are sent as redis-cli would send them."""
    text = next(block for block in blocks("sh") if "redis-cli XADD" in block)
    lines = text.replace("\\\n", " ").splitlines()
    commands = {(words := shlex.split(line, comments=True))[1]: words[1:] for line in lines}
    assert commands["SUBSCRIBE"].pop() == "&"
    with connect(server.url) as redis, redis.pubsub() as pubsub:
        pubsub.subscribe(commands["SUBSCRIBE"][1])
        redis.execute_command(*commands["XADD"])
        told: list[dict[str, object]] = []

        def hears_the_end() -> bool:
            message = pubsub.get_message(ignore_subscribe_messages=True, timeout=1)
            if message is not None:
                told.append(json.loads(message["data"]))
            return bool(told) and told[-1].get("ev") == "end"

        wait_until(hears_the_end)
        log = redis.execute_command(*commands["XRANGE"])
    stored = [
        json.loads(fields["d"] if isinstance(fields, dict) else fields[1]) for _, fields in log
    ]
    assert stored == told
    assert "".join(str(event.get("t", "")) for event in stored) == ANSWER
