"""The command line against a real server and the SDK's worker double."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tokenmill import Client
from tokenmill._link import Link
from tokenmill._redis import connect
from tokenmill._requests import Submission
from tokenmill.cli.app import tokenmill
from tokenmill.cli.connection import Connection
from tokenmill.cli.waiting import WaitingNotice
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.replies import EnqueueReply
from tokenmill.testing import FakeWorker, pieces_of


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true"
        time.sleep(0.01)


def echo(prompt: object) -> str:
    """Answers a prompt with itself, a chat with its roles and contents."""
    if isinstance(prompt, str):
        return f"you said {prompt}"
    assert isinstance(prompt, list)
    return " ".join(f"{message.role}={message.content}" for message in prompt)


class Queue:
    """A keyspace of the shared server: the command line, a client and workers on it."""

    def __init__(self, server: EmbeddedServer, keys: Keyspace) -> None:
        self.keys = keys
        self.url = server.url
        self.connection = Connection(server.url, keys.namespace)
        self.options = ["--redis-url", server.url, "--namespace", keys.namespace]

    def run(self, *arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(tokenmill, [*self.options, *arguments], input=input)

    def client(self) -> Client:
        return Client(self.url, namespace=self.keys.namespace)

    @contextmanager
    def worker(self, answer: Callable[[object], str] = echo) -> Iterator[None]:
        with connect(self.url) as redis, FakeWorker(redis, answer, namespace=self.keys.namespace):
            yield

    def show_card(self, **facts: object) -> None:
        with connect(self.url) as redis:
            redis.set(self.keys.worker_card("w1"), json.dumps({"id": "w1", **facts}), px=60_000)


@pytest.fixture
def queue(server: EmbeddedServer, keyspace: Keyspace) -> Queue:
    return Queue(server, keyspace)


def test_generate_prints_the_text(queue: Queue) -> None:
    with queue.worker():
        done = queue.run("generate", "hello world")

    assert (done.exit_code, done.stdout, done.stderr) == (0, "you said hello world\n", "")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_generate_reads_stdin(queue: Queue, arguments: list[str]) -> None:
    with queue.worker():
        done = queue.run("generate", *arguments, input="from a pipe\n")

    assert done.stdout == "you said from a pipe\n"


def test_generate_passes_sampling_parameters_on(queue: Queue) -> None:
    with queue.worker():
        done = queue.run("generate", "a b c d", "--max-tokens", "3", "--json")

    completion = json.loads(done.stdout)
    assert completion["text"] == "you said a "
    assert completion["finish_reason"] == "length"
    assert len(completion["token_ids"]) == 3


def test_verbose_reports_usage_on_stderr(queue: Queue) -> None:
    with queue.worker():
        done = queue.run("generate", "one two", "-v", "--request-id", "order-17")

    assert done.stdout == "you said one two\n"
    assert done.stderr.startswith("id order-17 · prompt 2 tokens · generated 4 · finish stop · ")
    assert done.stderr.count("\n") == 1


def test_chat_sends_messages(queue: Queue) -> None:
    with queue.worker():
        done = queue.run("chat", "Hi", "--system", "Be brief.")

    assert done.stdout == "system=Be brief. user=Hi\n"


def test_submit_then_result_stream_and_status(queue: Queue) -> None:
    submitted = queue.run("submit", "later", "--priority", "low", "--tenant", "a")
    request_id = submitted.stdout.strip()
    waiting_now = json.loads(queue.run("status", request_id, "--json").stdout)
    with queue.worker():
        result = queue.run("result", request_id, "--timeout-s", "20")
    ended = queue.run("status", request_id)

    assert (waiting_now["state"], waiting_now["priority"], waiting_now["tenant"]) == (
        "queued", "low", "a",
    )  # fmt: skip
    assert result.stdout == "you said later\n"
    assert queue.run("stream", request_id).stdout == "you said later\n"
    assert dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())["state"] == "done"


def test_stream_continues_after_an_event(queue: Queue) -> None:
    request_id = queue.run("submit", "a b").stdout.strip()
    with queue.worker():
        everything = queue.run("stream", request_id, "--events").stdout.splitlines()
    events = [json.loads(line) for line in everything]
    first_token = next(event for event in events if event["type"] == "token")
    rest = queue.run("stream", request_id, "--after", str(first_token["seq"]))

    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events] == ["start", *["token"] * 4, "end"]
    assert rest.stdout == "".join(pieces_of("you said a b")[1:]) + "\n"


def test_submit_again_is_the_same_request(queue: Queue) -> None:
    first = queue.run("submit", "--chat", "Hi", "--request-id", "r1", "--json")
    again = queue.run("submit", "--chat", "Hi", "--request-id", "r1", "--json")
    other = queue.run("submit", "Hi", "--request-id", "r1")

    assert json.loads(first.stdout) == {"id": "r1", "is_new": True}
    assert json.loads(again.stdout) == {"id": "r1", "is_new": False}
    assert other.exit_code == 2
    assert "r1" in other.stderr


def test_cancel_ends_a_request(queue: Queue) -> None:
    request_id = queue.run("submit", "x").stdout.strip()

    first = queue.run("cancel", request_id)
    second = queue.run("cancel", request_id)
    result = queue.run("result", request_id)

    assert first.stdout == f"{request_id} cancelled\n"
    assert second.stdout == f"{request_id} had ended before\n"
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: request {request_id} ended with cancelled")


def test_a_failed_request_shows_its_text_and_status_1(queue: Queue) -> None:
    def fail(prompt: object) -> str:
        raise RuntimeError

    with queue.worker(fail):
        done = queue.run("generate", "x")

    assert done.exit_code == 1
    assert "ended with internal" in done.stderr
    assert "Traceback" not in done.output


def test_result_does_not_wait_longer_than_told(queue: Queue) -> None:
    request_id = queue.run("submit", "x").stdout.strip()

    assert queue.run("result", request_id, "--timeout-s", "0.05").exit_code == 124


def test_explain_says_what_a_request_waits_for(queue: Queue) -> None:
    request_id = queue.run("submit", "x").stdout.strip()

    said = queue.run("explain", request_id)
    details = json.loads(queue.run("explain", request_id, "--json").stdout)

    assert said.exit_code == 0
    assert "worker" in said.stdout
    assert details["status"]["state"] == "queued"
    summary, first, second = said.stdout.splitlines()
    assert details["summary"] == summary
    assert first == "  +0.000 s  enqueued with priority normal"
    assert second.endswith(" s  ready")


@pytest.mark.parametrize("command", ["status", "explain", "result", "stream", "cancel"])
def test_an_unknown_id_is_one_line(queue: Queue, command: str) -> None:
    done = queue.run(command, "nobody")

    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_queue_counts_what_waits(queue: Queue) -> None:
    for priority, tenant in [("high", "a"), ("low", "a"), ("low", "b")]:
        queue.run("submit", "x", "--priority", priority, "--tenant", tenant)
    cancelled = queue.run("submit", "x").stdout.strip()
    queue.run("cancel", cancelled)
    queue.show_card(state="ready", model="m", running=0, metrics="127.0.0.1:1")

    snapshot = json.loads(queue.run("queue", "--json").stdout)
    table = queue.run("queue").stdout

    depth = {row["name"]: row["ready"] for row in snapshot["classes"]}
    assert (depth["high"], depth["low"]) == (1, 2)
    assert (snapshot["queued"], snapshot["leased"]) == (3, 0)
    assert snapshot["tenants"] == {"a": 2, "b": 1}
    assert [worker["id"] for worker in snapshot["workers"]] == ["w1"]
    assert 0 <= snapshot["oldest_s"] < 60
    assert "3 queued, 0 running" in table
    assert "w1" in table


def test_queue_counts_what_is_held_back(queue: Queue) -> None:
    with queue.client() as client:
        for number in range(20):  # the window of a tenant is 16
            client.submit("x", request_id=f"r{number}")
        client.submit("x", not_before=timedelta(hours=1))

    snapshot = json.loads(queue.run("queue", "--json").stdout)

    normal = next(row for row in snapshot["classes"] if row["name"] == "normal")
    assert (normal["ready"], normal["held"], snapshot["queued"]) == (16, 4, 21)
    assert "21 queued, 0 running, 1 delayed, 0 dead" in queue.run("queue").stdout


def test_an_empty_queue_says_that_nobody_works(queue: Queue) -> None:
    done = queue.run("queue")

    assert done.exit_code == 0
    assert "0 queued, 0 running" in done.stdout
    assert "no worker is alive" in done.stdout


@pytest.mark.parametrize(
    ("state", "notice"),
    [
        (None, "no worker is ready"),
        ("loading", "still loading"),
        ("draining", "no worker is ready"),
    ],
)
def test_a_waiting_request_is_explained_once(queue: Queue, state: str | None, notice: str) -> None:
    if state:
        queue.show_card(state=state)
    said: list[str] = []
    with WaitingNotice(queue.connection, every_s=0.01, say=said.append) as waiting:
        until(lambda: not waiting.is_watching)

    assert len(said) == 1
    assert notice in said[0]


def test_a_ready_worker_needs_no_notice(queue: Queue) -> None:
    queue.show_card(state="ready")
    said: list[str] = []
    with WaitingNotice(queue.connection, every_s=0.01, say=said.append) as waiting:
        until(lambda: waiting.looks >= 2)

    assert said == []


class Process:
    """The command in a process of its own."""

    def __init__(self, queue: Queue, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TOKENMILL_REDIS_URL": queue.url,
                "TOKENMILL_NAMESPACE": queue.keys.namespace,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test run in the background of a script inherits an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def ends(self) -> tuple[int, str, str]:
        stdout, stderr = self.popen.communicate(timeout=30)
        return self.popen.returncode, stdout, stderr


def test_the_environment_names_the_queue(queue: Queue) -> None:
    with queue.worker():
        assert Process(queue, "generate", "env").ends() == (0, "you said env\n", "")


@pytest.mark.parametrize("extra", [[], ["--request-id", "mine"]])
def test_ctrl_c_cancels_the_request(queue: Queue, extra: list[str]) -> None:
    process = Process(queue, "generate", "x", *extra)
    with connect(queue.url) as redis:
        until(lambda: redis.hget(queue.keys.counters, "queued") == "1")
        process.popen.send_signal(signal.SIGINT)

        assert process.ends() == (130, "", "interrupted\n")
        assert redis.hget(queue.keys.counters, "queued") == "0"
        (record,) = redis.scan_iter(match=queue.keys.record("*"))
        assert redis.hget(record, "state") == "cancelled"


@pytest.mark.parametrize("extra", [[], ["--request-id", "mine"]])
@pytest.mark.parametrize("arrives", [True, False])
def test_ctrl_c_while_the_request_is_sent(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, extra: list[str], arrives: bool
) -> None:
    """The server may have stored the request although its reply was never read."""
    enqueue = Link.enqueue

    def interrupted(link: Link, submission: Submission) -> EnqueueReply:
        if arrives:
            enqueue(link, submission)
        raise KeyboardInterrupt

    monkeypatch.setattr(Link, "enqueue", interrupted)
    done = queue.run("generate", "x", *extra)

    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")
    with connect(queue.url) as redis:
        records = list(redis.scan_iter(match=queue.keys.record("*")))
        assert [redis.hget(record, "state") for record in records] == ["cancelled"] * arrives


def test_ctrl_c_on_stream_leaves_the_request_alone(queue: Queue) -> None:
    request_id = queue.run("submit", "x").stdout.strip()
    process = Process(queue, "stream", request_id)
    with connect(queue.url) as redis, queue.client() as client:
        channel = queue.keys.channel(request_id)
        until(lambda: dict(redis.pubsub_numsub(channel))[channel] == 1)
        process.popen.send_signal(signal.SIGINT)

        assert process.ends()[0] == 130
        assert client.status(request_id).state == "queued"


def test_tokens_are_printed_as_they_come(queue: Queue) -> None:
    """Each piece is on stdout before the worker is allowed to make the next one."""
    go_on = threading.Semaphore(0)

    def one_at_a_time(prompt: object) -> Iterator[str]:
        for piece in ("one ", "two ", "three"):
            go_on.acquire()
            yield piece

    with queue.worker(one_at_a_time):  # type: ignore[arg-type]
        process = Process(queue, "generate", "x")
        stdout = process.popen.stdout
        assert stdout is not None
        for piece in ("one ", "two ", "three"):
            go_on.release()
            assert stdout.read(len(piece)) == piece
        assert process.ends()[0] == 0


def test_a_request_that_waits_for_a_worker_says_so(queue: Queue) -> None:
    process = Process(queue, "generate", "x")
    stderr = process.popen.stderr
    assert stderr is not None

    notice = stderr.readline()
    with queue.worker():
        status, stdout, rest = process.ends()

    assert "the request waits: no worker is ready in pool 'default'" in notice
    assert (status, stdout, rest) == (0, "you said x\n", "")


def test_a_stream_without_redis_is_one_line(queue: Queue, tmp_path: Path) -> None:
    process = Process(queue, "generate", "x", "--redis-url", f"unix://{tmp_path}/none.sock")

    status, stdout, stderr = process.ends()

    assert (status, stdout) == (os.EX_UNAVAILABLE, "")
    assert stderr.startswith("Error: Redis at unix:")
    assert stderr.count("\n") == 1
