"""No prompt, and nothing else that a caller sends, shows up where others read.

A word goes into every part of requests that end in every way; then all that the workers logged and
measured and all that is left in Redis is searched for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_canary import (
    CANARY,
    EVERYWHERE,
    INVALID,
    RAW,
    VALID,
    enqueue,
    read_metrics,
    where_it_shows,
)
from support_worker_process import Pool, WorkerProcess, eventually, pool_of_workers
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.protocol import TERMINAL_STATES
from tokenmill.scripts import run


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


def test_no_prompt_reaches_what_others_read(pool: Pool) -> None:
    for request_id, body in VALID.items():
        enqueue(pool, request_id, body)
    # Queued: the body is in the record, and nowhere else.
    assert where_it_shows(pool) == {pool.keys.record(request_id) for request_id in VALID}

    first = pool.start_ready("first", log_level="debug", log_format="json")
    metrics = end_in_every_way(pool, first)
    die_on_requests(pool, first)

    for worker in pool.workers:
        assert worker.log
        assert CANARY not in worker.log
    assert "vllm:request_success" in metrics
    assert CANARY not in metrics
    assert pool.client.xlen(pool.keys.dead_letters) == 1
    # A dead request keeps its body for a while, so that it can be tried again.
    assert where_it_shows(pool) <= {pool.keys.record("poison")}
    for key in pool.client.scan_iter(pool.keys.record("*")):
        state, body = pool.client.hmget(key, ["state", "body"])
        assert state in TERMINAL_STATES
        assert body is None or state == "dead"


def end_in_every_way(pool: Pool, worker: WorkerProcess) -> str:
    """Done, failed, cancelled, by plain XADD; returns the metrics afterwards."""
    for request_id, body in INVALID.items():
        enqueue(pool, request_id, body)
    for request_id, text in RAW.items():
        run(pool.client, pool.calls.enqueue(request_id, body=text))
    stream = pool.keys.ready("1")
    pool.client.xadd(stream, {"id": "plain-good", "body": json.dumps(VALID["valid-prompt"])})
    pool.client.xadd(stream, {"id": "plain-bad", "body": CANARY})
    pool.client.xadd(stream, {"id": "plain-big", "body": CANARY * 30_000})
    pool.client.xadd(stream, {"id": f"no id {CANARY}", "body": CANARY})
    pool.client.xadd(stream, {CANARY: CANARY})
    enqueue(pool, "cancelled", {"prompt": CANARY, **EVERYWHERE, "max_tokens": 4000})
    eventually(lambda: len(pool.tokens("cancelled")) > 2)
    run(pool.client, pool.calls.cancel("cancelled"))
    for request_id in (*VALID, "plain-good"):
        assert pool.end(request_id)["st"] == "done"
        assert pool.end(request_id)["meta"] == EVERYWHERE["meta"]  # the caller gets it back
    for request_id in (*INVALID, *RAW, "plain-bad", "plain-big"):
        assert pool.end(request_id)["st"] == "failed"
    eventually(pool.is_clean)
    return read_metrics(pool)


def die_on_requests(pool: Pool, first: WorkerProcess) -> None:
    """A request that hangs its worker until that is killed, and one that raises inside a step."""
    enqueue(pool, "poison", {**EVERYWHERE, "prompt": f"hang {CANARY}"})
    eventually(lambda: pool.state("poison") == "leased")
    first.kill()
    second = pool.start("second", log_level="debug", max_strikes=1)
    assert pool.end("poison")["st"] == "dead"
    enqueue(pool, "explosion", {**EVERYWHERE, "prompt": f"explode {CANARY}"})
    eventually(
        lambda: second.process.poll() is not None or pool.state("explosion") in TERMINAL_STATES
    )
    run(pool.client, pool.calls.cancel("explosion"))
