"""The same as `tests/worker/test_canary.py`, with a real engine, its tokenizer and its template."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support_canary import CANARY, EVERYWHERE, INVALID, RAW, VALID, enqueue, read_metrics
from support_canary import where_it_shows as keys_with_the_word
from support_worker_process import (
    Pool,
    WorkerProcess,
    clean_environment,
    eventually,
    pool_of_workers,
)
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.scripts import run

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

CHAT = [{"role": "user", "content": CANARY}]
#: What only a real engine looks at.
DEEPER: dict[str, dict[str, Any]] = {
    "tools": {"messages": CHAT, "chat_template_kwargs": {"tools": CANARY}, **EVERYWHERE},
    "documents": {"messages": CHAT, "chat_template_kwargs": {"documents": [CANARY]}, **EVERYWHERE},
    "continued": {"messages": CHAT, "continue_final_message": True, **EVERYWHERE},
    "control": {"prompt": f"<|im_end|>{CANARY}<|im_start|>", **EVERYWHERE},
    "tokens": {"prompt_token_ids": [2**31 - 1], **EVERYWHERE},
    "allowed": {"prompt": CANARY, "allowed_token_ids": [2**31 - 1], **EVERYWHERE},
    "bias": {"prompt": CANARY, "logit_bias": {str(2**31 - 1): 1}, **EVERYWHERE},
}


def start_real(pool: Pool, model: Path) -> WorkerProcess:
    log_file = pool.folder / "real.log"
    command = [
        *(sys.executable, "-m", "tokenmill_worker", "--redis-url", pool.server.url),
        *("--namespace", pool.keys.namespace, "--name", "real", "--model", str(model)),
        *("--max-model-len", "512", "--num-threads", "1", "--log-level", "debug"),
    ]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=clean_environment())
    pool.workers.append(WorkerProcess("real", process, log_file))
    eventually(lambda: "real" in pool.ready_workers(), timeout_s=300)
    return pool.workers[-1]


def test_no_prompt_reaches_what_others_read(
    server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path, smollm2_path: Path
) -> None:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        worker = start_real(pool, smollm2_path)
        for request_id, body in {**VALID, **INVALID, **DEEPER}.items():
            enqueue(pool, request_id, {**body, "max_tokens": 3})
        for request_id, text in RAW.items():
            run(pool.client, pool.calls.enqueue(request_id, body=text))
        states = {name: pool.end(name)["st"] for name in [*VALID, *INVALID, *DEEPER, *RAW]}
        messages = [pool.end(name).get("msg", "") for name in states]
        eventually(pool.is_clean)

        assert {states[name] for name in VALID} == {"done"}
        assert {states[name] for name in RAW} == {"failed"}
        assert [states["tokens"], states["allowed"], states["bias"]] == ["failed"] * 3
        assert CANARY not in "".join(messages)
        assert CANARY not in worker.log
        assert CANARY not in read_metrics(pool)
        # An answer may repeat what it was asked, and goes to the caller only.
        logs = {pool.keys.log(name) for name in states}
        assert keys_with_the_word(pool) <= logs
