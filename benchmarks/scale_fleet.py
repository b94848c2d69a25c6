"""Workers around an engine that computes nothing, forked from one process: `OPTIONS_JSON`.

The options are `FleetOptions`. Everything is imported once before the forks, so that 64 workers
start within seconds and share the memory of the code. At the end of stdin the workers are killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_worker.main import leave, run_worker
from tokenmill_worker.settings import load_settings

from .hot_path_engine import NoEngine


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """`slots` are of each worker; a step of the engine lasts `step_ms` whatever it holds."""

    redis_url: str
    workers: int
    slots: int
    step_ms: float
    flush_ms: int = 0
    lease_ms: int = 15_000
    partitions: int = 1


class ResumingEngine(NoEngine):
    """Also goes on with requests that another worker began."""

    def add_request(
        self, request_id: str, prompt: object, params: SamplingParams, **options: object
    ) -> None:
        super().add_request(request_id, prompt, params, **options)
        begun = options.get("output_token_ids", ())
        assert isinstance(begun, Sequence)
        self._missing[request_id] -= len(begun)
        self._made[request_id] = len(begun)


def main() -> None:
    options = FleetOptions(**json.loads(sys.argv[1]))
    pids = []
    for _ in range(options.workers):
        pid = os.fork()
        if not pid:
            _work(options)
        pids.append(pid)
    sys.stdin.read()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def _work(options: FleetOptions) -> None:
    settings = load_settings(
        {
            "redis_url": options.redis_url,
            "max_num_seqs": options.slots,
            "flush_ms": options.flush_ms,
            "lease_ms": options.lease_ms,
            "partitions": options.partitions,
            "socket_timeout_s": 60,
            "connect_timeout_s": 30,
            "log_level": "error",
            "model": "none",
        }
    )

    def build(on_phase: object) -> NoEngine:
        return ResumingEngine(options.step_ms / 1000)

    leave(run_worker(settings, build))  # type: ignore[arg-type]  # less typed than an Engine


if __name__ == "__main__":
    main()
