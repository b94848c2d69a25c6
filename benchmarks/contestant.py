"""A contestant: a process that loads its engine once and then measures jobs on demand.

Alone (`python -m benchmarks.offline`) it runs each of its jobs and prints the figures. With
`--serve` it reads a job's name per line on stdin and answers each with one line of JSON, which
lets `compare` take turns between engines that all stay loaded. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .measure import Figures, Job

#: The folder that stands for the default model, for tests, CI and benchmarks.
MODEL_VARIABLE = "TOKENMILL_TEST_MODEL"


@dataclass(frozen=True, slots=True)
class Options:
    """What every contestant gets. `model` is a Hugging Face folder."""

    model: str
    dtype: str
    max_num_seqs: int = 64
    max_model_len: int = 2048


#: Loads the engine, yields its jobs by name, and frees everything on exit.
Start = Callable[[Options], AbstractContextManager[Mapping[str, Job]]]


def main(description: str, start: Start) -> None:
    parser = argparse.ArgumentParser(description=description)
    add_model_arguments(parser)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each job; medians count")
    parser.add_argument("--jobs", help="comma-separated; default: all")
    parser.add_argument("--serve", action="store_true", help="answer jobs named on stdin")
    arguments = parser.parse_args()
    leave_on_sigterm()
    options = options_from(arguments)
    if arguments.serve:
        _serve(options, start)
        return
    chosen = arguments.jobs.split(",") if arguments.jobs else None
    _run_alone(options, start, chosen, arguments.repeat)


def leave_on_sigterm() -> None:
    """End by an exception, so that the processes that were started are ended too."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="Hugging Face folder; by default the default model's")
    parser.add_argument("--dtype", default="bfloat16")


def options_from(arguments: argparse.Namespace) -> Options:
    """Prepares the default model where none is named, which needs Tokenmill's environment."""
    model = arguments.model or os.environ.get(MODEL_VARIABLE)
    if not model:
        prepare = [sys.executable, "-m", "tokenmill_worker.model_store"]
        model = subprocess.run(prepare, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Options(model=str(Path(model.strip()).resolve()), dtype=arguments.dtype)


def _serve(options: Options, start: Start) -> None:
    replies = _take_stdout()
    with start(options) as jobs:
        _reply(replies, {"ready": True, "jobs": list(jobs)})
        for line in sys.stdin:
            _reply(replies, jobs[line.strip()]())


def _take_stdout() -> TextIO:
    """The real stdout; whatever a library prints from here on goes to stderr instead."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _reply(replies: TextIO, message: Mapping[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _run_alone(options: Options, start: Start, chosen: list[str] | None, repeat: int) -> None:
    progress("loading the engine")
    with start(options) as jobs:
        for name in chosen or list(jobs):
            runs: list[Figures] = []
            for turn in range(1, repeat + 1):
                progress(f"{name}: run {turn} of {repeat}")
                runs.append(jobs[name]())
            print(f"{name} (median of {repeat})")
            for figure in runs[0]:
                values = [run[figure] for run in runs]
                spread = f"{min(values):.4g} to {max(values):.4g}"
                print(f"  {figure:24}{statistics.median(values):>12.4g}   {spread}", flush=True)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
