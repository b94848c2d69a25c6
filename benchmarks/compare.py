"""Tokenmill against its peers: every engine stays loaded and they take turns, job by job.

Turns (A B A B …) make a drift of the machine hit everyone alike; medians are reported, and
ratios are taken within a round. `--only tokenmill` measures Tokenmill alone.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from . import environments, machine
from .contestant import add_model_arguments, leave_on_sigterm, options_from, progress
from .report import Outcome, table
from .roster import ENTRIES, JOBS, Contestant, Entry, loaded, ticking

RESULTS = environments.REPOSITORY / "benchmarks" / "results"
BUSY_WARNING_CORES = 0.15


def main() -> None:
    arguments = _parse()
    leave_on_sigterm()
    options = options_from(arguments)
    entries = [entry for entry in ENTRIES if _is_chosen(entry, arguments)]
    if not entries:
        raise SystemExit("no contestant has such a name and job")
    pythons = [entry.python() for entry in entries]
    record: dict[str, object] = {
        "machine": machine.describe(environments.REPOSITORY),
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "rounds": arguments.rounds,
    }
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-")))
        contestants = [
            stack.enter_context(loaded(entry, python, options, logs))
            for entry, python in zip(entries, pythons, strict=True)
        ]
        outcomes = _take_turns(contestants, arguments.jobs, arguments.rounds)
        record["contestants"] = {
            each.entry.name: {
                "ready_s": each.ready_s,
                "versions": each.versions,
                "preload": each.preload,
            }
            for each in contestants
        }
    record["runs"] = [asdict(outcome) for outcome in outcomes]
    _show(record, outcomes)
    _save(record, arguments.output)
    if any(each.failed for each in contestants):
        raise SystemExit("a contestant failed, see above")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenmill against its peers")
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="comma-separated starts of names: tokenmill, vllm, …")
    parser.add_argument("--jobs", default=",".join(JOBS), help="comma-separated")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/")
    arguments = parser.parse_args()
    arguments.jobs = [job for job in JOBS if job in arguments.jobs.split(",")]
    return arguments


def _is_chosen(entry: Entry, arguments: argparse.Namespace) -> bool:
    starts = tuple(arguments.only.split(",")) if arguments.only else ("",)
    return entry.name.startswith(starts) and bool(set(entry.jobs) & set(arguments.jobs))


def _take_turns(
    contestants: Sequence[Contestant], jobs: Sequence[str], rounds: int
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for job in jobs:
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


def _show(record: dict[str, object], outcomes: Sequence[Outcome]) -> None:
    print(table(outcomes))
    print()
    for subject in ("machine", "contestants"):
        facts = record[subject]
        assert isinstance(facts, dict)
        for name, value in facts.items():
            print(f"{name}: {value}")


def _save(record: dict[str, object], output: Path | None) -> None:
    circumstances = record["machine"]
    assert isinstance(circumstances, dict)
    date = str(circumstances["date"])[:19].replace(":", "")
    path = output or RESULTS / f"{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    progress(f"saved {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
