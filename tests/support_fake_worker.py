"""A worker process with the fake engine: `support_fake_worker.py OPTIONS_JSON STEP_SECONDS`."""

from __future__ import annotations

import json
import sys

from support_worker import fake_engine_factory
from tokenmill_worker.main import leave, run_worker
from tokenmill_worker.settings import load_settings

if __name__ == "__main__":
    settings = load_settings(json.loads(sys.argv[1]))
    factory = fake_engine_factory(
        step_s=float(sys.argv[2]),
        max_num_seqs=settings.max_num_seqs,
        num_blocks=settings.num_gpu_blocks_override or 100_000,
        block_size=settings.block_size,
    )
    leave(run_worker(settings, factory))
