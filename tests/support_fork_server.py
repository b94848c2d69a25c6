"""Real workers on a real model in a tenth of a second: a process that has loaded all, and forks.

Run as a script: `support_fork_server.py ENGINE_OPTIONS_JSON`. It loads the model, then forks a
worker for each line on stdin, the JSON of its settings and its log file, and answers with its pid.
When it forks it has one thread, so nothing is lost in the child. At the end of stdin it kills all.

A worker stops in front of the token that its request's name says, `greedy-17` after 17 tokens: it
is then in the state in which a test wants to kill it. Only a request's first attempt stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill_engine.llm import LLM
from tokenmill_engine.llm_engine import LLMEngine
from tokenmill_engine.outputs import RequestOutput
from tokenmill_worker.main import leave, run_worker
from tokenmill_worker.settings import load_settings


class StoppingEngine:
    """The engine, but for the stop."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_tokens: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_request(self, request_id: str, *arguments: Any, **options: Any) -> None:
        self._engine.add_request(request_id, *arguments, **options)
        self._num_tokens[request_id] = len(options["output_token_ids"])

    def step(self) -> list[RequestOutput]:
        if any(stop_of(name) == count for name, count in self._num_tokens.items()):
            threading.Event().wait()
        return [self._count(output) for output in self._engine.step()]

    def _count(self, output: RequestOutput) -> RequestOutput:
        name = output.request_id
        self._num_tokens[name] += len(output.new_token_ids)
        if output.finish_reason is None:
            return output
        if stop_of(name) == self._num_tokens.pop(name):
            # Behind the last token: as if the worker died between storing it and the end event.
            return replace(output, finish_reason=None, stop_reason=None)
        return output


def stop_of(attempt_id: str) -> int | None:
    """Of the name inside the engine, `<request>-<stop>/<attempt>.<created>`."""
    request_id, _, fence = attempt_id.partition("/")
    stop = request_id.rpartition("-")[2]
    is_first = fence.partition(".")[0] == "1"
    return int(stop) if stop.isdigit() and is_first else None


def serve(engine: LLMEngine) -> None:
    children: list[int] = []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        settings, log_file = json.loads(line)
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        if num_threads != 1:
            sys.exit(f"{num_threads} threads: a fork would lose all but one")
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become_worker(settings, log_file, lambda _on_phase: StoppingEngine(engine))
        children.append(pid)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def become_worker(settings: dict[str, Any], log_file: str, factory: Callable[..., Any]) -> None:
    with Path(log_file).open("ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, sys.stdin.fileno())
    os.dup2(devnull, sys.stdout.fileno())
    code = 1
    try:
        code = run_worker(load_settings(settings), factory)
    finally:
        leave(code)


if __name__ == "__main__":
    serve(LLM(**json.loads(sys.argv[1])).engine)
