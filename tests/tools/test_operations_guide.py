"""docs/operations.md and docs/tools.md as a reader follows them: every command as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokenmill import Client
from tokenmill._redis import connect
from tokenmill.cli.app import COMMANDS, tokenmill
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker
from tokenmill_worker.settings import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "operations.md").read_text()
PAGES = [GUIDE, (DOCS / "tools.md").read_text(), (DOCS / "configuration.md").read_text()]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```$", page, re.M | re.S)


def commands() -> list[str]:
    """Lines of the guide that begin with our command."""
    return [
        line.removeprefix("tokenmill ")
        for block in blocks(GUIDE)
        for line in block.splitlines()
        if line.startswith("tokenmill ")
    ]


@pytest.fixture(scope="module")
def reader(server: EmbeddedServer) -> Iterator[tuple[dict[str, str], str]]:
    """The environment of a reader whose pool has a worker, and the id of a request."""
    keys = Keyspace(namespace="test-operations-guide")
    with (
        connect(server.url) as redis,
        Client(server.url, namespace=keys.namespace) as client,
        FakeWorker(redis, lambda _: "word " * 3, namespace=keys.namespace),
    ):
        request = client.submit("x")
        client.result(request.id)
        yield (
            {"TOKENMILL_REDIS_URL": server.url, "TOKENMILL_NAMESPACE": keys.namespace},
            request.id,
        )


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_guide_works(reader: tuple[dict[str, str], str], command: str) -> None:
    environment, request_id = reader
    arguments = [request_id if word == "ID" else word for word in _words(command)]

    done = CliRunner().invoke(tokenmill, arguments, env=environment)

    # A move or a doctor may have something to say; wrong usage is 2, and doctor's errors as well.
    allowed = {"doctor": {0, 1, 2}, "queue move": {0, 1}}.get(_name(arguments), {0})
    assert done.exit_code in allowed, done.output
    assert "Usage:" not in done.output


def _words(command: str) -> list[str]:
    return [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]


def _name(arguments: list[str]) -> str:
    return " ".join(arguments[:2]) if arguments[0] == "queue" else arguments[0]


def test_the_guide_names_no_command_or_option_that_is_not_there() -> None:
    known = {*COMMANDS, "worker", "demo"}
    for page in PAGES:
        used = set(re.findall(r"`tokenmill ([a-z]+)", page))
        assert used <= known, used - known
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    in_tuning = set(re.findall(r"`(--[a-z-]+)", GUIDE.partition("## Tuning")[2].partition("##")[0]))
    assert in_tuning
    assert in_tuning <= options, in_tuning - options


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([a-z/.-]+\.md)\)", page):
            assert (DOCS / target).is_file(), target
