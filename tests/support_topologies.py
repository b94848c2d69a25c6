"""Worker processes and streams on any kind of Redis, and what must come out of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support_worker import expected_tokens, text_of
from support_worker_process import TESTS, WorkerProcess, clean_environment, eventually
from tokenmill import Client
from tokenmill.protocol import EndEvent, Event, RewindEvent, TokenEvent

SEED = 7


@dataclass
class Workers:
    """Worker processes with the fake engine that serve one pool of one Redis."""

    url: str
    pool: str
    folder: Path
    processes: list[WorkerProcess] = field(default_factory=list)

    def start(self, name: str, *, step_s: float = 0.01, **options: object) -> WorkerProcess:
        """Start one and wait until it is ready."""
        settings = {
            "redis_url": self.url, "pool": self.pool, "name": name, "lease_ms": 1500,
            "max_num_seqs": 16, **options,
        }  # fmt: skip
        log_file = self.folder / f"{name}.log"
        command = [
            sys.executable, str(TESTS / "support_fake_worker.py"), json.dumps(settings), str(step_s)
        ]  # fmt: skip
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=clean_environment())
        worker = WorkerProcess(name, process, log_file)
        self.processes.append(worker)
        eventually(lambda: " ready " in worker.log or process.poll() is not None)
        assert process.poll() is None, worker.log
        return worker


@contextmanager
def workers_of(url: str, pool: str, folder: Path) -> Iterator[Workers]:
    workers = Workers(url, pool, folder)
    try:
        yield workers
    finally:
        for worker in workers.processes:
            if worker.process.poll() is None:
                worker.kill()


@dataclass
class Transcript:
    """What a reader of a stream has seen."""

    request_id: str
    prompt: str
    num_tokens: int
    events: list[Event] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return any(isinstance(event, EndEvent) for event in list(self.events))

    @property
    def num_rewinds(self) -> int:
        return sum(isinstance(event, RewindEvent) for event in self.events)

    def check(self) -> None:
        """Each token once and in order, up to rewinds; one end; the oracle's tokens and text."""
        token_ids: list[int] = []
        text = ""
        for event in self.events:
            if isinstance(event, RewindEvent):
                del token_ids[event.index :]
                text = text_of(token_ids)
            elif isinstance(event, TokenEvent):
                assert event.index == len(token_ids)
                token_ids += event.token_ids
                text += event.text
        ends = [event for event in self.events if isinstance(event, EndEvent)]
        assert len(ends) == 1
        assert self.events[-1] is ends[0]
        assert ends[0].status == "done"
        assert token_ids == expected_tokens(self.prompt.encode(), SEED, self.num_tokens)
        assert text + ends[0].text == text_of(token_ids)


class Readers:
    """Streams that are read in threads of their own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(64)
        self._reading: list[Future[None]] = []
        self.transcripts: list[Transcript] = []

    def read(self, request_ids: Sequence[str], num_tokens: int) -> None:
        for request_id in request_ids:
            transcript = Transcript(request_id, f"prompt {request_id}", num_tokens)
            self.transcripts.append(transcript)
            self._reading.append(self._pool.submit(self._read, transcript))

    @property
    def num_tokens(self) -> int:
        """Seen so far by all of them."""
        seen = (event for transcript in self.transcripts for event in list(transcript.events))
        return sum(len(event.token_ids) for event in seen if isinstance(event, TokenEvent))

    def finish(self, timeout_s: float = 60) -> None:
        """Wait for all, and check what they saw."""
        for reading in self._reading:
            reading.result(timeout_s)
        self._pool.shutdown()
        for transcript in self.transcripts:
            transcript.check()

    def _read(self, transcript: Transcript) -> None:
        with self._client.stream(
            transcript.prompt,
            request_id=transcript.request_id,
            max_tokens=transcript.num_tokens,
            seed=SEED,
        ) as stream:
            for event in stream.events():
                transcript.events.append(event)
