"""Worker processes with the fake engine, and what Redis says about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis

from support_worker import expected_tokens, text_of
from tokenmill._redis import connect
from tokenmill.calls import QueueCalls
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.protocol import Usage
from tokenmill.scripts import run

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PYTHONPATH = os.pathsep.join(str(ROOT / part) for part in ("client", "engine", "worker", "tests"))
LEASE_MS = 1500
T = TypeVar("T")


def clean_environment() -> dict[str, str]:
    """This process's environment without options of a worker."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOKENMILL_", "REDIS_"))}
    return kept | {"PYTHONPATH": PYTHONPATH}


def eventually(condition: Callable[[], T], timeout_s: float = 30.0) -> T:
    """The first true value of `condition`; AssertionError when it takes too long."""
    give_up_at = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < give_up_at, "the condition did not come true"
        time.sleep(0.02)
    return value


@dataclass
class WorkerProcess:
    name: str
    process: subprocess.Popen[bytes]
    log_file: Path

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        return self.process.wait(timeout=30)

    @property
    def log(self) -> str:
        return self.log_file.read_text()


@dataclass
class Pool:
    """One pool on a real server: requests in, workers beside it, logs out."""

    server: EmbeddedServer
    keys: Keyspace
    folder: Path
    client: redis.Redis = field(init=False)
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = connect(self.server.url)
        self.calls = QueueCalls(self.keys)

    def start(self, name: str, *, step_s: float = 0.01, **options: object) -> WorkerProcess:
        """A worker; it may still be loading."""
        settings: dict[str, object] = {
            "redis_url": self.server.url,
            "namespace": self.keys.namespace,
            "pool": self.keys.pool,
            "name": name,
            "lease_ms": LEASE_MS,
            "max_num_seqs": 8,
            **options,
        }
        log_file = self.folder / f"{name}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(TESTS / "support_fake_worker.py"),
                    json.dumps(settings),
                    str(step_s),
                ],
                stderr=log,
                env=clean_environment(),
            )
        self.workers.append(WorkerProcess(name, process, log_file))
        return self.workers[-1]

    def start_ready(self, name: str, *, step_s: float = 0.01, **options: object) -> WorkerProcess:
        worker = self.start(name, step_s=step_s, **options)
        eventually(lambda: name in self.ready_workers())
        return worker

    def cards(self) -> list[dict[str, Any]]:
        keys = list(self.client.scan_iter(self.keys.worker_cards))
        return [json.loads(card) for card in self.client.mget(keys) if card] if keys else []

    def ready_workers(self) -> set[str]:
        ready = [card for card in self.cards() if card["state"] == "ready"]
        return {str(card["id"]).rsplit("-", 2)[0] for card in ready}

    def submit(self, request_id: str, prompt: str = "hello", **body: object) -> None:
        text = json.dumps({"prompt": prompt, "seed": 7, **body})
        run(self.client, self.calls.enqueue(request_id, body=text))

    def events(self, request_id: str) -> list[dict[str, Any]]:
        entries = self.client.xrange(self.keys.log(request_id))
        return [json.loads(fields["d"]) for _, fields in entries]

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events(request_id) for token in event.get("k", [])]

    def text(self, request_id: str) -> str:
        return "".join(event.get("t", "") for event in self.events(request_id))

    def state(self, request_id: str) -> str | None:
        return self.client.hget(self.keys.record(request_id), "state")

    def end(self, request_id: str) -> dict[str, Any]:
        """Wait for the end event."""

        def last() -> dict[str, Any] | None:
            events = self.events(request_id)
            return events[-1] if events and events[-1].get("ev") == "end" else None

        return eventually(last)

    def check_transcript(self, request_id: str, prompt: str, seed: int, count: int) -> None:
        """The log is what one undisturbed worker would have written, up to its division."""
        end = self.end(request_id)
        events = self.events(request_id)
        assert [event["e"] for event in events] == list(range(1, len(events) + 1))
        assert [event.get("ev") for event in events].count("end") == 1
        attempts = [event["a"] for event in events]
        assert attempts == sorted(attempts)
        expected = expected_tokens(prompt.encode(), seed, count)
        assert self.tokens(request_id) == expected
        assert self.text(request_id) == text_of(expected)
        assert (end["st"], end["fin"], end["n"]) == ("done", "length", count)
        assert Usage.model_validate(end["usage"]).completion_tokens == count

    def is_clean(self) -> bool:
        """Nothing held, queued or pending is left."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hlen(self.keys.owners)
        pipe.zcard(self.keys.deadlines)
        pipe.zcard(self.keys.delayed)
        for stream in self.keys.ready_streams.values():
            pipe.xlen(stream)
        return not any(pipe.execute())


@contextmanager
def pool_of_workers(server: EmbeddedServer, keys: Keyspace, folder: Path) -> Iterator[Pool]:
    pool = Pool(server, keys, folder)
    try:
        yield pool
    finally:
        for worker in pool.workers:
            if worker.process.poll() is None:
                worker.kill()
        pool.client.close()


def starts_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("ev") == "start"]
