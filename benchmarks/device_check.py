"""One command that checks the GPU path on a real device and measures it, in two runs of 5 minutes.

`python -m benchmarks.device_check --run a` is correctness and the speed of the attention alone,
`--run b` the speed of steps and of a workload. Each result is printed as soon as it is known and
stands in JSON and text in `--output`. A wrong result stops the timings that depend on it, and the
exit status is 1. `--device cpu --tiny` runs the same code in Triton's interpreter.

Weights are random and drawn on the device; nothing is downloaded, no setting of the device changed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if "cpu" in sys.argv:  # Triton reads this when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import transformers

from .device_stages.attention import check_attention, time_attention
from .device_stages.context import Bench, CheckFailed
from .device_stages.engine import check_engine, check_graphs, run_workload
from .device_stages.fusions import time_fusions
from .device_stages.machine import check_machine
from .device_stages.sampling import check_sampling
from .device_stages.steps import time_large_model, time_small_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """`budget_s`: what has not been done then is left out. `needs`: stages that must not fail."""

    name: str
    work: Callable[[Bench], None]
    budget_s: int
    needs: tuple[str, ...] = ()


STAGES = (
    Stage("0 machine", check_machine, 15),
    Stage("1 attention", check_attention, 70),
    Stage("2 graphs", check_graphs, 30, ("1 attention",)),
    Stage("3 sampling", check_sampling, 15),
    Stage("4 engine", check_engine, 80, ("1 attention",)),
    Stage("5 attention speed", time_attention, 60, ("1 attention",)),
    Stage("6 steps of 0.6B", time_small_model, 60, ("2 graphs",)),
    Stage("7 steps of 8B", time_large_model, 80, ("2 graphs",)),
    Stage("8 workload", run_workload, 60, ("2 graphs",)),
    Stage("9 fusions", time_fusions, 60, ("2 graphs",)),
)
RUNS = {"a": "012345", "b": "026789", "all": "0123456789"}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    device = torch.device(options.device)
    bench = Bench(device, options.tiny)
    transformers.logging.set_verbosity_error()
    if device.type == "cuda":
        torch.cuda.init()
    failed: set[str] = set()
    chosen = options.stages or RUNS[options.run]
    for stage in STAGES:
        if stage.name[0] not in chosen:
            continue
        bench.stage = stage.name
        if missing := failed.intersection(stage.needs):
            bench.line("left out", because=f"{', '.join(sorted(missing))} failed")
            failed.add(stage.name)
        elif not _run(bench, stage):
            failed.add(stage.name)
        _write(options.output, bench, failed)
    print(f"failed: {', '.join(sorted(failed)) or 'nothing'}")
    return 1 if failed else 0


def _run(bench: Bench, stage: Stage) -> bool:
    began_s = time.monotonic()
    bench.deadline_s = math.inf if bench.tiny else began_s + stage.budget_s
    try:
        stage.work(bench)
    except CheckFailed as why:
        bench.line("FAILED", why=str(why))
        return False
    except Exception as why:
        # A stage that breaks must not take the later ones along: device time is short.
        logger.exception("stage %s broke", stage.name)
        bench.line("BROKE", why=f"{type(why).__name__}: {str(why)[:2000]}")
        return False
    finally:
        if bench.is_cuda:
            torch.cuda.empty_cache()
    bench.line("done", seconds=time.monotonic() - began_s)
    return True


def _write(folder: Path, bench: Bench, failed: set[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report = {"device": str(bench.device), "tiny": bench.tiny, "failed": sorted(failed)}
    text = json.dumps({**report, "lines": bench.lines}, indent=1, default=str)
    (folder / "device_check.json").write_text(text + "\n")
    (folder / "device_check.txt").write_text("\n".join(bench.printed) + "\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.device_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--run", choices=tuple(RUNS), default="all")
    parser.add_argument("--stages", default="", help="digits, instead of --run")
    parser.add_argument("--output", type=Path, default=Path("device-check"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
