"""A worker with `--log-format json`: each line is an object that says which request it is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support_worker_process import Pool, eventually, pool_of_workers
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.scripts import run

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def about(lines: list[dict[str, Any]], request_id: str) -> dict[str, dict[str, Any]]:
    return {line["message"]: line for line in lines if line.get("request") == request_id}


def test_every_line_is_json_from_the_start_to_the_end(
    server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path
) -> None:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        worker = pool.start_ready("one", log_format="json", log_level="debug")
        live_through_much(pool)
        assert worker.terminate() == 0
        lines = [json.loads(line) for line in worker.log.splitlines()]

    assert {"time", "level", "worker", "message"} <= set.intersection(*map(set, lines))
    assert len({line["worker"] for line in lines}) == 1
    assert {"ready", "draining", "stopped"} <= {line["message"] for line in lines}
    ended = about(lines, "done")["request ended"]
    assert (ended["status"], ended["tokens"], ended["attempt"]) == ("done", 5, 1)
    assert ended["trace"] == TRACE_ID
    assert about(lines, "refused")["request ended"]["code"] == "invalid_request"
    assert about(lines, "cancelled")["request dropped"]["reason"] == "taken"
    assert "trace" not in about(lines, "cancelled")["request dropped"]
    assert about(lines, "handed-over")["request released"]["reply"] == "OK"
    assert "canary" not in worker.log


def live_through_much(pool: Pool) -> None:
    """A request for each way in which a worker can be rid of one."""
    fields = {"id": "done", "body": '{"prompt":"canary","max_tokens":5}'}
    fields["traceparent"] = f"00-{TRACE_ID}-b7ad6b7169203331-01"
    pool.client.xadd(pool.keys.ready("1"), fields)
    pool.end("done")
    pool.submit("refused", prompt="refuse canary")
    pool.end("refused")
    for request_id in ("cancelled", "handed-over"):
        pool.submit(request_id, prompt="canary", max_tokens=4000)
        eventually(lambda name=request_id: pool.tokens(name))
    run(pool.client, pool.calls.cancel("cancelled"))
    eventually(lambda: "request dropped" in pool.workers[0].log)
