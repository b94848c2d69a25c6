"""The arithmetic and the turn-taking of the benchmarks; no engine is measured here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

CONTESTANT = """
from contextlib import contextmanager
from benchmarks.contestant import main

@contextmanager
def start(options):
    print("a library that prints to stdout")
    yield {"length": lambda: {"letters": float(len(options.dtype))}}

main("a contestant without an engine", start)
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY)
    from benchmarks import contestant, measure, report, roster, workload

    return SimpleNamespace(
        contestant=contestant, measure=measure, report=report, roster=roster, workload=workload
    )


def test_mixed64_is_the_workload_that_older_figures_are_of(benchmarks: Any) -> None:
    requests = benchmarks.workload.mixed()
    assert len(requests) == 64
    assert benchmarks.workload.total_prompt_tokens(requests) == 10_010
    assert benchmarks.workload.total_output_tokens(requests) == 5_105
    assert requests[0].prompt_token_ids[:3] == [25347, 27662, 2753]
    assert (requests[-1].prompt_token_ids[-1], requests[-1].max_tokens) == (11_766, 106)


@pytest.mark.parametrize("share", [0, 1, 50, 99, 100])
def test_percentile_agrees_with_numpy(benchmarks: Any, share: int) -> None:
    values = np.random.default_rng(3).exponential(size=37)
    assert benchmarks.measure.percentile(values.tolist(), share) == pytest.approx(
        np.percentile(values, share)
    )


def test_figures_of_a_stream_follow_from_its_arrivals(benchmarks: Any) -> None:
    measure = benchmarks.measure
    request = benchmarks.workload.Request([1], 4)
    clock = measure.StreamClock(sent=10.0, arrivals=[12.0, 12.5, 13.5], num_tokens=4)
    figures = measure.stream_figures([request], [clock], duration_s=8.0)
    assert figures["output_tok_s"] == pytest.approx(0.5)
    assert figures["ttft_p50_s"] == pytest.approx(2.0)
    assert figures["itl_p50_ms"] == pytest.approx(750)
    assert figures["tpot_p99_ms"] == pytest.approx(500)
    assert figures["tokens_per_chunk"] == pytest.approx(4 / 3)


def test_too_few_tokens_are_no_figure(benchmarks: Any) -> None:
    jobs = benchmarks.measure.offline_jobs(lambda requests: [1 for _ in requests])
    with pytest.raises(benchmarks.measure.WrongLength, match="asked for 5105 output tokens"):
        jobs["mixed64"]()


def test_the_split_counts_only_the_further_steps(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(benchmarks.measure.time, "perf_counter", lambda: now_s)

    def generate(requests: list[Any]) -> list[int]:
        nonlocal now_s
        lengths = [request.max_tokens for request in requests]
        now_s += 2.0 + 0.05 * (max(lengths) - 1)  # 2 s for the prompts, 50 ms for a decode step
        return lengths

    figures = benchmarks.measure.offline_jobs(generate)["split64"]()
    assert figures["prefill_tok_s"] == pytest.approx(64 * 200 / 2.0)
    assert figures["decode_step_ms"] == pytest.approx(50)
    assert figures["decode_tok_s"] == pytest.approx(64 / 0.05)


def test_ratios_are_taken_within_a_round(benchmarks: Any) -> None:
    def run(contestant: str, turn: int, tok_s: float) -> Any:
        return benchmarks.report.Outcome(contestant, "mixed64", turn, 0.0, {"output_tok_s": tok_s})

    # The machine is three times as fast in round 2; ours is 1.1 times theirs throughout.
    outcomes = [
        run("vllm", 1, 100), run("tokenmill", 1, 110), run("vllm", 2, 300),
        run("tokenmill", 2, 330), run("tokenmill", 3, 900),
    ]  # fmt: skip
    ratio = benchmarks.report.median_ratio(outcomes, "mixed64", "tokenmill", "output_tok_s")
    assert ratio == pytest.approx(1.1)
    assert "1.10 of vllm" in benchmarks.report.table(outcomes)


def test_a_lower_latency_is_ahead(benchmarks: Any) -> None:
    def run(contestant: str, seconds: float) -> Any:
        return benchmarks.report.Outcome(contestant, "stream64", 1, 0.0, {"ttft_p50_s": seconds})

    slower = benchmarks.report.table([run("vllm-server", 1.0), run("tokenmill-queue", 2.0)])
    faster = benchmarks.report.table([run("vllm-server", 2.0), run("tokenmill-queue", 1.0)])
    assert "(behind)" in slower
    assert "(behind)" not in faster


def test_a_contestant_answers_the_jobs_it_is_asked_for(benchmarks: Any, tmp_path: Path) -> None:
    (tmp_path / "fake_contestant.py").write_text(CONTESTANT)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    entry = benchmarks.roster.Entry("fake", "fake_contestant", ("length",), ())
    options = benchmarks.contestant.Options(model="m", dtype="bfloat16")
    with benchmarks.roster.loaded(entry, str(python), options, tmp_path) as contestant:
        assert [contestant.measure("length") for _ in range(2)] == [{"letters": 8.0}] * 2
        # It is stopped now, so that it disturbs nobody; this waits for the signal to arrive.
        change = os.waitid(os.P_PID, contestant.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert change is not None
        assert change.si_status == signal.SIGSTOP
    assert contestant.process.returncode == 0
    assert "prints to stdout" in contestant.log.read_text()


def test_a_contestant_that_cannot_start_shows_its_log(benchmarks: Any, tmp_path: Path) -> None:
    entry = benchmarks.roster.Entry("fake", "no_such_module", ("length",), ())
    options = benchmarks.contestant.Options(model="m", dtype="bfloat16")
    with (
        pytest.raises(SystemExit, match="no_such_module"),
        benchmarks.roster.loaded(entry, sys.executable, options, tmp_path),
    ):
        pytest.fail("it started")


def test_the_peers_side_needs_only_the_standard_library() -> None:
    names = ("workload", "measure", "contestant", "processes")
    imports = "; ".join(f"import benchmarks.{name}" for name in names)
    # -I -S: neither site-packages nor the environment's paths.
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {imports}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
