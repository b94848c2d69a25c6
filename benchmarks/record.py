"""A comparison's figures and circumstances: saved as they come, shown and drawn at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import acceptance, environments
from .contestant import progress
from .picture import picture
from .report import Outcome, table
from .roster import Contestant

RESULTS = environments.REPOSITORY / "benchmarks" / "results"


class Report:
    """`facts` are the circumstances, `machine` among them. Without `output` the file lies in
    `benchmarks/results/`, named after the date; the picture lies beside it."""

    def __init__(self, facts: dict[str, Any], output: Path | None) -> None:
        self.facts = facts
        self.outcomes: list[Outcome] = []
        date = str(facts["machine"]["date"])[:19].replace(":", "")
        self.path = output or RESULTS / f"{date}.json"

    def introduce(self, contestants: Sequence[Contestant]) -> None:
        self.facts["contestants"] = {
            each.entry.name: {
                "ready_s": each.ready_s,
                "versions": each.versions,
                "preload": each.preload,
            }
            for each in contestants
        }

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """One job is over: everything so far is saved."""
        self.outcomes += outcomes
        record = {**self.facts, "runs": [asdict(outcome) for outcome in self.outcomes]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n")
        progress(f"saved {os.path.relpath(self.path)}")

    def show(self) -> None:
        print(table(self.outcomes), end="\n\n")
        found = list(acceptance.verdicts(self.outcomes))
        if found:
            print(acceptance.table(self.outcomes), end="\n\n")
            drawn = self.path.with_suffix(".svg")
            drawn.write_text(picture(self._title(), found))
            progress(f"saved {os.path.relpath(drawn)}")
        for subject in ("machine", "contestants"):
            for name, value in self.facts.get(subject, {}).items():
                print(f"{name}: {value}")

    def _title(self) -> str:
        """What ran on which machine, and when."""
        machine = self.facts["machine"]
        return (
            f"{self.facts['model']}, {self.facts['dtype']}, {machine['cores']} cores "
            f"{machine['cpu']}, {str(machine['date'])[:10]}"
        )


def join(files: Sequence[Path], output: Path | None) -> Report:
    """One report of several files: the circumstances of the first, the contestants of all."""
    records: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    facts = {name: value for name, value in records[0].items() if name != "runs"}
    facts["contestants"] = {
        name: facts_of
        for record in records
        for name, facts_of in record.get("contestants", {}).items()
    }
    report = Report(facts, output or files[0].with_name(f"{files[0].stem}-joined.json"))
    for record in records:
        # Rounds of different files are no pairs.
        before = max((outcome.round for outcome in report.outcomes), default=0)
        runs = [Outcome(**run) for run in record["runs"]]
        report.add([replace(run, round=run.round + before) for run in runs])
    return report
