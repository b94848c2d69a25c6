"""The device check before it meets a device: all stages in the interpreter, and failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from benchmarks import device_check
from benchmarks.device_check import STAGES, Stage, main
from benchmarks.device_stages.context import Bench


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, list[dict[str, object]]]]:
    """Exit status, and the lines of each stage."""
    status = main(["--device", "cpu", "--tiny", "--output", str(folder), *arguments])
    report = json.loads((folder / "device_check.json").read_text())
    lines: dict[str, list[dict[str, object]]] = {}
    for line in report["lines"]:
        lines.setdefault(line["stage"], []).append(line)
    return status, lines


def test_the_machine_and_the_attention(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "--stages", "01")
    assert status == 0
    assert list(lines) == ["0 machine", "1 attention"]
    errors = [line["error"] for line in lines["1 attention"] if "error" in line]
    assert len(errors) == 2
    assert all(0 < error < 1e-5 for error in errors)
    assert "[1 attention] plain: error" in (tmp_path / "device_check.txt").read_text()


def test_steps_with_and_without_fused_modules(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "--stages", "9")
    assert status == 0
    row, done = lines["9 fusions"]
    assert done["what"] == "done"
    assert {
        f"{fused}_{kind}_ms" for fused in ("fused", "unfused") for kind in ("plain", "graph")
    } <= set(row)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage(tmp_path: Path) -> None:
    status, lines = run(tmp_path)
    assert status == 0
    assert list(lines) == [stage.name for stage in STAGES]
    assert all(stage[-1]["what"] == "done" for stage in lines.values())
    engine = [line for line in lines["4 engine"] if "preempted" in line]
    assert len(engine) == 12
    fused = [line for line in lines["4 engine"] if "unfused_error" in line]
    assert [line["layers"] for line in fused] == [1] * 4  # two models in two types
    assert lines["2 graphs"][0]["recorded"] > 0


def test_a_failure_stops_what_depends_on_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(bench: Bench) -> None:
        bench.require(1 + 1 == 3, "arithmetic")

    def broken(bench: Bench) -> None:
        raise KeyError("gone")

    def fine(bench: Bench) -> None:
        bench.line("fine", figure=1.0)

    stages = (
        Stage("1 wrong", wrong, 5),
        Stage("2 broken", broken, 5),
        Stage("3 fine", fine, 5),
        Stage("4 dependent", fine, 5, ("1 wrong",)),
        Stage("5 on a dependent", fine, 5, ("4 dependent",)),
    )
    monkeypatch.setattr(device_check, "STAGES", stages)
    status, lines = run(tmp_path, "--stages", "12345")
    assert status == 1
    assert [stage[-1]["what"] for stage in lines.values()] == [
        "FAILED", "BROKE", "done", "left out", "left out",
    ]  # fmt: skip
    report = json.loads((tmp_path / "device_check.json").read_text())
    assert len(report["failed"]) == 4
