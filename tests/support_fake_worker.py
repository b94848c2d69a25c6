"""A worker process with the fake engine: `support_fake_worker.py OPTIONS_JSON STEP_SECONDS`."""

from __future__ import annotations

import json
import sys

from support_worker import fake_engine_factory
from tokenmill_worker.main import leave, run_worker
from tokenmill_worker.settings import load_settings

if __name__ == "__main__":
    settings = load_settings(json.loads(sys.argv[1]))
    leave(run_worker(settings, fake_engine_factory(step_s=float(sys.argv[2]))))
