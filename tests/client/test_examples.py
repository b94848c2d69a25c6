"""The examples run, and say what the worker said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_sdk import TEXT
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.testing import FakeWorker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with a worker in the default pool, where the examples look for one."""
    with (
        EmbeddedServer() as server,
        connect(server.url) as connection,
        FakeWorker(connection, lambda _: TEXT),
    ):
        yield server.url


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("generate", f"{TEXT}\n{TEXT[:-4]}"),
        ("stream", f"{TEXT}\n4 + 9 tokens"),
        ("async_stream", f"Roses are{TEXT}\nThe sea is{TEXT}\nTo be or{TEXT}"),
        ("submit_and_attach", f"{TEXT}\nprompt_tokens=4 completion_tokens=9"),
    ],
)
def test_an_example_runs(url: str, name: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env={**os.environ, "TOKENMILL_REDIS_URL": url, "PYTHONPATH": str(ROOT / "client")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert done.stderr == ""
