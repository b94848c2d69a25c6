"""A whole comparison of contestants without engines: turns, files, verdicts, and a broken one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

CONTESTANT = """
from contextlib import contextmanager
from benchmarks.contestant import main

@contextmanager
def start(options):
    yield {{"mixed64": lambda: {{"output_tok_s": {figure}}}}}

main("a contestant without an engine", start)
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY)
    from benchmarks import compare, machine, roster

    monkeypatch.setattr(machine, "busy_cores", lambda: 0.5)
    monkeypatch.setattr(roster, "SETTLE_S", 0.0)
    return SimpleNamespace(compare=compare, roster=roster)


@pytest.fixture
def entries(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is 1.2 times theirs; a third cannot be loaded."""
    for name, figure in (("ours", 120.0), ("theirs", 100.0)):
        (tmp_path / f"{name}.py").write_text(CONTESTANT.format(figure=figure))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    entry = benchmarks.roster.Entry
    monkeypatch.setattr(entry, "python", lambda self: str(python))
    modules = {"tokenmill": "ours", "vllm": "theirs", "openvino": "no_such_module"}
    made = tuple(entry(name, module, ("mixed64",), ()) for name, module in modules.items())
    monkeypatch.setattr(benchmarks.compare, "ENTRIES", made)


@pytest.mark.usefixtures("entries")
def test_what_could_be_measured_is_judged_and_saved(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    output = tmp_path / "results" / "run.json"
    arguments = ["--model", str(tmp_path), "--rounds", "3", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])

    with pytest.raises(SystemExit, match="a contestant failed"):
        benchmarks.compare.main()

    record = json.loads(output.read_text())
    turns = [(run["round"], run["contestant"]) for run in record["runs"]]
    assert turns == [(n, name) for n in (1, 2, 3) for name in ("tokenmill", "vllm")]
    assert {run["busy_cores"] for run in record["runs"]} == {0.5}
    shown = capsys.readouterr()
    assert "≥ 1.05 ok" in shown.out
    assert "no_such_module" in shown.err
    assert "other processes keep 0.50 cores busy" in shown.err
    assert output.with_suffix(".svg").read_text().startswith("<svg")

    monkeypatch.setattr(sys, "argv", ["compare", "--join", str(output), str(output)])
    benchmarks.compare.main()
    assert "≥ 1.05 ok" in capsys.readouterr().out
    joined = json.loads(output.with_name("run-joined.json").read_text())
    assert len(joined["runs"]) == 12
