"""A worker process to disturb: `worker_process.py OPTIONS_JSON KIND STEP_SECONDS`."""

from __future__ import annotations

import json
import sys

from chaos.engines import engine_factory
from tokenmill_worker.main import leave, run_worker
from tokenmill_worker.settings import load_settings

if __name__ == "__main__":
    settings = load_settings(json.loads(sys.argv[1]))
    kind, step_s = sys.argv[2], float(sys.argv[3])
    leave(run_worker(settings, engine_factory(settings, kind, step_s)))  # type: ignore[arg-type]
