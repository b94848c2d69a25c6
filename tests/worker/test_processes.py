"""Real worker processes on a real server: what they promise when they or Redis are disturbed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_redis import unique_keyspace
from support_worker_process import Pool, eventually, pool_of_workers, starts_of
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.scripts import run


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


@pytest.fixture(scope="module")
def single(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with one worker for one request at a time, shared by tests that leave it unharmed."""
    with pool_of_workers(server, unique_keyspace(), tmp_path_factory.mktemp("single")) as pool:
        pool.start_ready("single", max_num_seqs=1)
        yield pool


def test_requests_stream_through_and_leave_nothing_behind(pool: Pool) -> None:
    for number in range(20):
        pool.submit(f"request-{number}", f"prompt {number}", max_tokens=5 + number)
    worker = pool.start("one")

    for number in range(20):
        pool.check_transcript(f"request-{number}", f"prompt {number}", 7, 5 + number)
        assert starts_of(pool.events(f"request-{number}"))[0]["i"] == 0
    assert pool.is_clean()
    assert worker.terminate() == os.EX_OK
    assert pool.cards() == []
    assert "prompt" not in worker.log.replace("prompt_tokens", "")
    for stream in pool.keys.ready_streams.values():
        assert pool.client.xinfo_consumers(stream, "tokenmill") == []


def test_a_drained_worker_hands_over_and_its_peer_continues(pool: Pool) -> None:
    first = pool.start_ready("first")
    for number in range(4):
        pool.submit(f"request-{number}", max_tokens=150)
    eventually(lambda: all(len(pool.tokens(f"request-{n}")) > 20 for n in range(4)))
    second = pool.start("second")

    assert first.terminate() == os.EX_OK

    for number in range(4):
        pool.check_transcript(f"request-{number}", "hello", 7, 150)
        starts = starts_of(pool.events(f"request-{number}"))
        assert [start["a"] for start in starts] == [1, 2]
        assert starts[1]["i"] > 20
        record = pool.client.hgetall(pool.keys.record(f"request-{number}"))
        assert record["strikes"] == "0"
    assert second.terminate() == os.EX_OK
    assert pool.is_clean()


def test_a_drain_with_grace_finishes_what_is_running(pool: Pool) -> None:
    worker = pool.start_ready("only", drain_grace_s=30)
    pool.submit("request-1", max_tokens=100)
    eventually(lambda: len(pool.tokens("request-1")) > 5)

    assert worker.terminate() == os.EX_OK

    pool.check_transcript("request-1", "hello", 7, 100)
    assert len(starts_of(pool.events("request-1"))) == 1


def test_the_second_signal_cuts_the_grace_short(pool: Pool) -> None:
    worker = pool.start_ready("only", drain_grace_s=600, step_s=0.05)
    pool.submit("request-1", max_tokens=4000)
    eventually(lambda: len(pool.tokens("request-1")) > 2)
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: pool.cards()[0]["state"] == "draining")

    assert worker.terminate() == os.EX_OK

    assert pool.state("request-1") == "queued"


def test_a_killed_workers_requests_continue_elsewhere(pool: Pool) -> None:
    first = pool.start_ready("first")
    for number in range(4):
        pool.submit(f"request-{number}", max_tokens=150, logprobs=1)
    eventually(lambda: all(len(pool.tokens(f"request-{n}")) > 20 for n in range(4)))
    pool.start("second")

    first.kill()

    for number in range(4):
        pool.check_transcript(f"request-{number}", "hello", 7, 150)
        assert len(starts_of(pool.events(f"request-{number}"))) == 2
    assert pool.is_clean()


def test_a_cancelled_request_ends_at_once_and_frees_its_place(single: Pool) -> None:
    single.submit("long", max_tokens=4000)
    eventually(lambda: len(single.tokens("long")) > 5)
    single.submit("next", max_tokens=3)

    assert run(single.client, single.calls.cancel("long")).cancelled

    single.check_transcript("next", "hello", 7, 3)
    end = single.end("long")
    assert (end["st"], end["code"]) == ("cancelled", "cancelled")
    assert single.is_clean()


def test_a_deadline_ends_a_running_request(single: Pool) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 4000})
    run(single.client, single.calls.enqueue("late", body=body, deadline_ms=500))
    single.submit("after", max_tokens=3)

    assert single.end("late")["code"] == "deadline_exceeded"
    single.check_transcript("after", "hello", 7, 3)


def test_malformed_entries_harm_nobody(single: Pool) -> None:
    stream = single.keys.ready("1")
    single.client.xadd(stream, {"what": "ever"})
    single.client.xadd(stream, {"id": "nobody-knows-me"})
    single.client.xadd(stream, {"id": b"\xff\xfe\x00", "body": "{}"})
    single.client.xadd(
        stream, {"id": "plain-good", "body": '{"prompt":"hello","max_tokens":3,"seed":7}'}
    )
    for number, body in enumerate([b"\xff\xfe", b"{", b"[" * 100_000, b'{"prompt":1}', b""]):
        single.client.xadd(stream, {"id": f"plain-{number}", "body": body})
    single.submit("good", max_tokens=3)

    single.check_transcript("good", "hello", 7, 3)
    single.check_transcript("plain-good", "hello", 7, 3)
    for number in range(5):
        end = single.end(f"plain-{number}")
        assert (end["st"], end["code"]) == ("failed", "invalid_request")
    eventually(single.is_clean)
