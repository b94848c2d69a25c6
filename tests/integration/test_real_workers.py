"""The whole path on a real model: server, worker processes and a client, and a worker that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support_prompts import PROMPTS
from support_worker_process import clean_environment, eventually
from tokenmill import Client
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.protocol import Completion
from tokenmill_engine.llm import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

LEASE_MS = 3000
#: float32: there a greedy answer does not depend on what else is in the batch.
ENGINE_OPTIONS = ["--dtype", "float32", "--max-model-len", "1024", "--num-threads", "1"]


@dataclass
class RealWorkers:
    """Worker processes as an operator starts them."""

    server: EmbeddedServer
    keys: Keyspace
    model: Path
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *options: str) -> None:
        arguments = [
            *("--redis-url", self.server.url),
            *("--namespace", self.keys.namespace),
            *("--pool", self.keys.pool),
            *("--name", name),
            *("--model", str(self.model)),
            *("--lease-ms", str(LEASE_MS)),
            *ENGINE_OPTIONS,
            *options,
        ]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tokenmill_worker", *arguments],
                stderr=log,
                env=clean_environment() | {"OMP_NUM_THREADS": "1"},
            )

    def wait_ready(self, count: int) -> None:
        with connect(self.server.url) as redis:

            def are_ready() -> bool:
                assert all(process.poll() is None for process in self.processes.values())
                cards = [redis.get(key) or "" for key in redis.scan_iter(self.keys.worker_cards)]
                return sum('"ready"' in card for card in cards) >= count

            eventually(are_ready, timeout_s=300)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def workers(
    server: EmbeddedServer, keyspace: Keyspace, smollm2_path: Path, tmp_path: Path
) -> Iterator[RealWorkers]:
    workers = RealWorkers(server, keyspace, smollm2_path, tmp_path)
    try:
        yield workers
    finally:
        workers.stop()


@pytest.fixture
def client(server: EmbeddedServer, keyspace: Keyspace) -> Iterator[Client]:
    with Client(server.url, namespace=keyspace.namespace, pool=keyspace.pool) as client:
        yield client


def _stream_all(
    client: Client, prompts: list[str], max_tokens: int, *, when_streaming: object = None
) -> list[Completion]:
    """Reads all streams at once, each in a thread, text by text as a user would."""

    def one(prompt: str) -> Completion:
        with client.stream(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True) as stream:
            text = "".join(stream)
            completion = stream.completion()
        assert text == completion.text
        return completion

    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(one, prompt) for prompt in prompts]
        if callable(when_streaming):
            when_streaming()
        return [future.result() for future in futures]


def _undisturbed(model: Path, prompts: list[str], max_tokens: int) -> list[tuple[str, list[int]]]:
    llm = LLM(str(model), dtype="float32", max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    answers = [llm.generate(prompt, params)[0] for prompt in prompts]
    return [(answer.text, answer.token_ids) for answer in answers]


def _check(
    completions: list[Completion], expected: list[tuple[str, list[int]]], max_tokens: int
) -> None:
    for completion, (text, token_ids) in zip(completions, expected, strict=True):
        assert completion.token_ids == token_ids
        assert completion.text == text
        assert completion.finish_reason == "length"
        assert completion.usage.completion_tokens == max_tokens


def test_a_worker_process_answers_and_drains(workers: RealWorkers, client: Client) -> None:
    workers.start("alone")
    workers.wait_ready(1)
    prompts = PROMPTS[:4]
    completions = _stream_all(client, prompts, 12)
    _check(completions, _undisturbed(workers.model, prompts, 12), 12)
    worker = workers.processes["alone"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 0


@pytest.mark.slow
@pytest.mark.chaos
def test_forty_streams_survive_the_death_of_one_of_two_workers(
    workers: RealWorkers, client: Client, keyspace: Keyspace, server: EmbeddedServer
) -> None:
    max_tokens = 48
    prompts = (PROMPTS * 2)[:40]
    expected = _undisturbed(workers.model, prompts[:32], max_tokens)
    for name in ("doomed", "survivor"):
        workers.start(name, "--max-num-seqs", "20")
    workers.wait_ready(2)

    def kill_one_in_mid_stream() -> None:
        with connect(server.url) as redis:

            def doomed_is_streaming() -> bool:
                """It holds many requests, and at least half of those have tokens in the log."""
                held = [
                    request_id
                    for request_id in redis.hkeys(keyspace.owners)
                    if str(redis.hget(keyspace.record(request_id), "worker")).startswith("doomed")
                ]
                streaming = [held_id for held_id in held if redis.xlen(keyspace.log(held_id)) > 4]
                return len(streaming) >= 8

            eventually(doomed_is_streaming, timeout_s=120)
        os.kill(workers.processes["doomed"].pid, signal.SIGKILL)

    completions = _stream_all(client, prompts, max_tokens, when_streaming=kill_one_in_mid_stream)
    _check(completions, (expected * 2)[:40], max_tokens)
    taken_over = sum(completion.attempts > 1 for completion in completions)
    assert taken_over >= 8
    assert workers.processes["survivor"].poll() is None
