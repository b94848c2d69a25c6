"""The arithmetic and the turn-taking of the benchmarks; no engine is measured here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

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
    from benchmarks import (
        acceptance,
        contestant,
        measure,
        picture,
        record,
        report,
        roster,
        startup,
        workload,
    )

    modules = (
        acceptance, contestant, measure, picture, record, report, roster, startup, workload,
    )  # fmt: skip
    return SimpleNamespace(**{module.__name__.split(".")[-1]: module for module in modules})


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


class ModelOfAnEngine:
    """2 s for the prompts, which come in two halves, and 50 ms for each step of decoding."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.prompts: list[list[int]] = []

    def generate(self, requests: list[Any]) -> list[int]:
        self.prompts += [request.prompt_token_ids for request in requests]
        for _ in self.steps(requests):
            pass
        return [request.max_tokens for request in requests]

    def steps(self, requests: list[Any]) -> Iterator[int]:
        first, second = requests[: len(requests) // 2], requests[len(requests) // 2 :]
        self.now_s += 1.0
        if first:
            yield len(first)
        self.now_s += 1.0
        yield sum(request.max_tokens > 1 for request in first) + len(second)
        made = [2] * len(first) + [1] * len(second)
        while any(n < request.max_tokens for n, request in zip(made, requests, strict=True)):
            self.now_s += 0.05
            lacking = [n < request.max_tokens for n, request in zip(made, requests, strict=True)]
            made = [n + more for n, more in zip(made, lacking, strict=True)]
            yield sum(lacking)


@pytest.fixture
def engine(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> ModelOfAnEngine:
    engine = ModelOfAnEngine()
    monkeypatch.setattr(benchmarks.measure.time, "perf_counter", lambda: engine.now_s)
    return engine


def jobs_of(benchmarks: Any, engine: ModelOfAnEngine) -> Any:
    return benchmarks.measure.offline_jobs(engine.generate, engine.steps)


def test_too_few_tokens_are_no_figure(benchmarks: Any) -> None:
    measure = benchmarks.measure
    jobs = measure.offline_jobs(lambda requests: [1 for _ in requests], lambda requests: [1, 1])
    with pytest.raises(measure.WrongLength, match="asked for 5105 output tokens"):
        jobs["mixed64"]()
    with pytest.raises(measure.WrongLength, match="asked for 65 output tokens, got 2"):
        jobs["single"]()


def test_a_decode_step_is_one_in_which_all_requests_decode(
    benchmarks: Any, engine: ModelOfAnEngine
) -> None:
    figures = jobs_of(benchmarks, engine)["decode64"]()
    assert figures["decode_step_ms"] == pytest.approx(50)
    assert figures["decode_tok_s"] == pytest.approx(64 / 0.05)
    # The first half has two of its 40 tokens when all decode: 38 steps are left to it.
    assert figures["steps"] == 38


def test_prefill_and_a_stream_alone(benchmarks: Any, engine: ModelOfAnEngine) -> None:
    jobs = jobs_of(benchmarks, engine)
    assert jobs["prefill"]()["prefill_tok_s"] == pytest.approx(64 * 200 / 2.0)
    assert jobs["single"]()["single_tok_s"] == pytest.approx(1 / 0.05)


def test_no_prefix_cache_knows_the_prompts_of_another_run(
    benchmarks: Any, engine: ModelOfAnEngine
) -> None:
    jobs = jobs_of(benchmarks, engine)
    for job in ("mixed64", "mixed64", "prefill"):
        jobs[job]()
    assert len({tuple(prompt[:16]) for prompt in engine.prompts}) == 3 * 64
    assert all(100 <= token < 49_000 for prompt in engine.prompts for token in prompt)
    engine.prompts.clear()
    jobs["prefix64"]()
    jobs["prefix64"]()
    # Within a run all begin alike.
    assert [
        len({tuple(p[:400]) for p in part}) for part in (engine.prompts[:64], engine.prompts[64:])
    ] == [1, 1]
    assert engine.prompts[0][:16] != engine.prompts[64][:16]
    assert len({tuple(prompt[400:416]) for prompt in engine.prompts}) == 2 * 64


def test_the_second_start_finds_what_the_first_left(benchmarks: Any) -> None:
    folders: list[Path] = []

    @contextmanager
    def start_server(environment: Mapping[str, str]) -> Iterator[None]:
        cache = Path(environment["XDG_CACHE_HOME"])
        assert cache.exists() == bool(folders)
        cache.mkdir(parents=True, exist_ok=True)
        folders.append(cache)
        yield

    figures = benchmarks.startup.startup_jobs(start_server)["startup"]()
    assert set(figures) == {"first_ready_s", "warm_ready_s"}
    assert folders[0] == folders[1]
    assert not folders[0].exists()


def outcome(
    benchmarks: Any, contestant: str, turn: int, figure: float, job: str = "mixed64"
) -> Any:
    name = {"mixed64": "output_tok_s", "startup": "first_ready_s"}.get(job, "itl_p99_ms")
    return benchmarks.report.Outcome(contestant, job, turn, 0.0, {name: figure})


def test_a_promise_is_judged_by_the_median_of_its_pairs(benchmarks: Any) -> None:
    outcomes = [
        outcome(benchmarks, contestant, turn, figure)
        for turn, ours, theirs in ((1, 130, 100), (2, 100, 100), (3, 113, 100))
        for contestant, figure in (("tokenmill", ours), ("vllm", theirs))
    ]
    (verdict,) = benchmarks.acceptance.verdicts(outcomes)
    assert verdict.line.name == "a"
    assert verdict.ratio == pytest.approx(1.13)
    assert (verdict.meets_must, verdict.meets_aim) == (True, False)
    assert "≥ 1.05 ok" in benchmarks.acceptance.table(outcomes)
    assert "only 2 of 3 pairs" in benchmarks.acceptance.table(outcomes[:4])


def test_a_promise_of_latency_bounds_from_above(benchmarks: Any) -> None:
    def row(ours: float) -> str:
        pair = (("tokenmill-queue", ours), ("vllm-server", 100.0))
        runs = [outcome(benchmarks, name, 1, figure, "stream64") for name, figure in pair]
        return str(benchmarks.acceptance.table(runs))

    assert "≤ 1 ok" in row(90)
    assert "≤ 0.3 no" in row(90)
    assert "≤ 1 NO" in row(110)


def test_the_picture_shows_every_verdict(benchmarks: Any) -> None:
    outcomes = [
        outcome(benchmarks, contestant, 1, figure, job)
        for contestant, job, figure in (
            ("tokenmill", "mixed64", 120), ("vllm", "mixed64", 100),
            ("tokenmill-startup", "startup", 50), ("vllm-startup", "startup", 75),
        )
    ]  # fmt: skip
    verdicts = list(benchmarks.acceptance.verdicts(outcomes))
    drawn = benchmarks.picture.picture("A < B", verdicts)
    root = ElementTree.fromstring(drawn)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] == "A < B"
    assert {"1.20×", "1.50×"} <= set(texts)
    bars = [element for element in root.iter() if element.tag.endswith("rect")][1:]
    # The promise of line a is kept, that of the start is not.
    assert len({bar.get("fill") for bar in bars}) == 2


def test_files_are_joined_without_pairs_across_them(benchmarks: Any, tmp_path: Path) -> None:
    files = []
    for number, (ours, theirs) in enumerate(((120, 100), (10, 10))):
        report = benchmarks.record.Report(
            {"machine": {"date": "2026-01-01", "cores": 2, "cpu": "x"}, "model": "m", "dtype": "d"},
            tmp_path / f"{number}.json",
        )
        report.add([outcome(benchmarks, "tokenmill", 1, ours)])
        report.add([outcome(benchmarks, "vllm", 1, theirs)])
        files.append(report.path)
    joined = benchmarks.record.join(files, tmp_path / "joined.json")
    (verdict,) = benchmarks.acceptance.verdicts(joined.outcomes)
    assert verdict.ratios == pytest.approx([1.2, 1.0])
    joined.show()
    assert (tmp_path / "joined.svg").read_text().startswith("<svg")


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
    names = ("workload", "measure", "contestant", "processes", "startup")
    imports = "; ".join(f"import benchmarks.{name}" for name in names)
    # -I -S: neither site-packages nor the environment's paths.
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {imports}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
