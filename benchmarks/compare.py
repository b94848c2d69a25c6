"""Tokenmill against its peers: every engine stays loaded and they take turns, job by job.

Turns (A B A B …) make a drift of the machine hit everyone alike; medians are reported, and
ratios are taken within a round. `--only tokenmill` measures Tokenmill alone. What was measured is
saved after every job, so that whoever stops it early keeps what there is; `--join` puts the runs
of several files under one table and one picture.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from . import environments, machine
from .contestant import add_model_arguments, leave_on_sigterm, options_from, progress
from .record import Report, join
from .report import Outcome
from .roster import ENTRIES, JOBS, Contestant, Entry, loaded, ticking

BUSY_WARNING_CORES = 0.15


def main() -> None:
    arguments = _parse()
    if arguments.join:
        join(arguments.join, arguments.output).show()
        return
    leave_on_sigterm()
    options = options_from(arguments)
    entries = [entry for entry in ENTRIES if _is_chosen(entry, arguments)]
    if not entries:
        raise SystemExit("no contestant has such a name and job")
    pythons = [entry.python() for entry in entries]
    report = Report(
        {
            "machine": machine.describe(environments.REPOSITORY),
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "rounds": arguments.rounds,
        },
        arguments.output,
    )
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-")))
        contestants = []
        for entry, python in zip(entries, pythons, strict=True):
            try:
                contestants.append(stack.enter_context(loaded(entry, python, options, logs)))
            except SystemExit as failure:  # the others are measured without it
                progress(str(failure))
        report.introduce(contestants)
        for job in arguments.jobs:
            report.add(_take_turns(contestants, job, arguments.rounds))
    report.show()
    if len(contestants) < len(entries) or any(each.failed for each in contestants):
        raise SystemExit("a contestant failed, see above")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenmill against its peers")
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="comma-separated starts of names: tokenmill, vllm, …")
    parser.add_argument("--jobs", default=",".join(JOBS), help="comma-separated")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/")
    parser.add_argument("--join", type=Path, nargs="+", help="show these files; nothing is run")
    arguments = parser.parse_args()
    arguments.jobs = [job for job in JOBS if job in arguments.jobs.split(",")]
    return arguments


def _is_chosen(entry: Entry, arguments: argparse.Namespace) -> bool:
    starts = tuple(arguments.only.split(",")) if arguments.only else ("",)
    return entry.name.startswith(starts) and bool(set(entry.jobs) & set(arguments.jobs))


def _take_turns(contestants: Sequence[Contestant], job: str, rounds: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for turn in range(1, rounds + 1):
        for contestant in contestants:
            most = contestant.entry.most_rounds or rounds
            if contestant.failed or job not in contestant.entry.jobs or turn > most:
                continue
            try:
                outcomes.append(_one_run(contestant, job, turn))
            except SystemExit as failure:  # the others' figures are not lost with it
                contestant.failed = True
                progress(str(failure))
    return outcomes


def _one_run(contestant: Contestant, job: str, turn: int) -> Outcome:
    busy = machine.busy_cores()
    if busy > BUSY_WARNING_CORES:
        progress(f"warning: other processes keep {busy:.2f} cores busy")
    label = f"{job} round {turn}: {contestant.entry.name}"
    with ticking(label):
        figures = contestant.measure(job)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    progress(f"{label}: {shown}")
    return Outcome(contestant.entry.name, job, turn, round(busy, 3), figures)


if __name__ == "__main__":
    main()
