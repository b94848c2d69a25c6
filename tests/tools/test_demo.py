"""The demo: its figures, how it shows streams side by side, and that nothing outlives it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from tokenmill.cli.app import tokenmill
from tokenmill_worker.commands import demo as demo_command
from tokenmill_worker.demo.engine_steps import EngineSteps, counter_value
from tokenmill_worker.demo.prompts import QUESTIONS, demo_questions
from tokenmill_worker.demo.report import report_table, total_line
from tokenmill_worker.demo.streams import StreamRecord
from tokenmill_worker.demo.view import LineView, LiveView, make_view


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true"
        time.sleep(0.02)


def record_of(number: int, *, started_s: float, first_s: float, ended_s: float, tokens: int):
    return StreamRecord(
        number,
        f"question {number}",
        started_s=started_s,
        first_token_s=first_s,
        ended_s=ended_s,
        num_tokens=tokens,
        finish_reason="length",
    )


def text_of(renderable: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_questions_repeat_when_more_are_asked_for() -> None:
    assert demo_questions(len(QUESTIONS) + 2) == [*QUESTIONS, *QUESTIONS[:2]]
    assert len({len(question) for question in QUESTIONS}) > 4, "prompts of different lengths"


def test_counters_are_read_from_an_exposition() -> None:
    exposition = (
        "# TYPE tokenmill_engine_steps_total counter\n"
        'tokenmill_engine_steps_total{engine="0",model_name="m"} 41.0\n'
        'vllm:generation_tokens_total{engine="0",model_name="m"} 123.0\n'
        'vllm:generation_tokens_total_other{engine="0"} 7.0\n'
    )

    assert counter_value(exposition, "tokenmill_engine_steps_total") == 41
    assert counter_value(exposition, "vllm:generation_tokens_total") == 123
    assert counter_value(exposition, "absent") == 0


def test_mean_batch_size_is_of_the_time_in_between() -> None:
    before = EngineSteps(steps=100, generation_tokens=100)
    after = EngineSteps(steps=150, generation_tokens=300)

    assert after.since(before).mean_batch_size == 4.0
    assert before.since(before).mean_batch_size is None


def test_the_report_has_the_figures_of_each_request_and_of_all() -> None:
    records = [
        record_of(1, started_s=10.0, first_s=10.5, ended_s=12.5, tokens=21),
        record_of(2, started_s=10.0, first_s=11.25, ended_s=14.0, tokens=9),
    ]

    table = text_of(report_table(records))
    total = total_line(records, EngineSteps(steps=20, generation_tokens=30))

    first = next(line for line in table.splitlines() if "question 1" in line)
    assert [cell.strip() for cell in first.strip("│").split("│")] == [
        "1", "question 1", "0.50 s", "21", "10.0", "length",
    ]  # fmt: skip
    # 30 tokens from 10.0 to 14.0
    assert (
        total
        == "30 tokens in 4.0 s: 7.5 tokens/s in total; 1.5 sequences per engine step (20 steps)"
    )


def test_a_request_without_a_token_has_no_rate() -> None:
    record = StreamRecord(1, "q", started_s=1.0, ended_s=2.0, finish_reason="failed")

    row = next(line for line in text_of(report_table([record])).splitlines() if "failed" in line)
    assert row.count("–") == 2


def test_lines_of_several_requests_interleave() -> None:
    output = io.StringIO()
    records = [StreamRecord(1, "a"), StreamRecord(2, "b")]
    with LineView(Console(file=output, width=80)) as view:
        for _ in range(30):
            for record in records:
                view.on_text(record, f" word{record.number}")
        for record in records:
            record.finish_reason = "stop"
            view.on_text(record, "")

    lines = output.getvalue().splitlines()
    numbers = [line[:3] for line in lines]
    assert numbers[:4] == ["[1]", "[2]", "[1]", "[2]"]
    for number in (1, 2):
        pieces = [line[4:] for line in lines if line.startswith(f"[{number}]")]
        assert pieces.pop() == "– 0 tokens, stop –"
        assert " ".join(pieces) == " ".join([f"word{number}"] * 30), "no text is lost or cut"


def test_panels_show_the_end_of_each_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=24)
    records = [StreamRecord(n, f"question {n}", text=f"begin {n} " + "x\n" * 50) for n in (1, 2, 3)]
    records[1].text += "the end"
    view = make_view(console, records)
    assert isinstance(view, LiveView)

    with view:
        pass

    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "question 1" in shown
    assert "the end" in shown
    assert "begin 2" not in shown


def test_output_that_is_no_terminal_gets_lines() -> None:
    assert isinstance(make_view(Console(file=io.StringIO()), []), LineView)


class RunningDemo:
    """`tokenmill demo` as a process, with a temporary folder of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.output = folder.parent / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tokenmill", "demo", *arguments],
                env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ends(self, timeout_s: float = 200.0) -> int:
        return self.process.wait(timeout_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


def left_over(folder: Path) -> list[str]:
    """What the demo left in the temporary folder; torch keeps a cache of its own there."""
    return [entry.name for entry in folder.iterdir() if not entry.name.startswith("torch")]


def none_is_left(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.model
@pytest.mark.timeout(400)
def test_the_demo_streams_side_by_side_and_leaves_nothing(folder: Path) -> None:
    demo = RunningDemo(folder, "--requests", "3", "--max-tokens", "40")
    until(lambda: "streaming" in demo.text or demo.process.poll() is not None, 200.0)
    children = demo.children()

    assert demo.ends() == 0, demo.text
    assert len(children) == 2, "a server and a worker"
    assert none_is_left(children)
    assert left_over(folder) == []
    pieces = [line[1] for line in demo.text.splitlines() if line.startswith("[")]
    assert set(pieces) == {"1", "2", "3"}
    changes = sum(a != b for a, b in pairwise(pieces))
    assert changes > 3, "streams take turns; one after the other would change twice"
    assert "Paris" in demo.text
    assert "sequences per engine step" in demo.text


@pytest.mark.model
@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [
        ("loading", signal.SIGINT, 130),
        ("streaming", signal.SIGINT, 130),
        ("streaming", signal.SIGTERM, 130),
    ],
)
def test_an_interrupted_demo_leaves_nothing(
    folder: Path, moment: str, number: int, status: int
) -> None:
    demo = RunningDemo(folder, "--requests", "4", "--max-tokens", "2000")
    until(lambda: moment in demo.text, 200.0)
    children = demo.children()

    os.kill(demo.process.pid, number)

    assert demo.ends(60.0) == status, demo.text
    assert none_is_left(children)
    assert left_over(folder) == []
    assert "Traceback" not in demo.text, demo.text


@pytest.mark.model
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_killed_demo_leaves_no_process(folder: Path) -> None:
    demo = RunningDemo(folder, "--requests", "1", "--max-tokens", "2000")
    until(lambda: "streaming" in demo.text, 200.0)
    children = demo.children()
    assert len(children) == 2

    demo.process.kill()
    demo.process.wait()

    until(lambda: none_is_left(children), 30.0)


@pytest.mark.model
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_lost_worker_ends_the_demo_with_one_line(folder: Path) -> None:
    demo = RunningDemo(folder, "--requests", "2", "--max-tokens", "2000")
    until(lambda: "[1]" in demo.text, 200.0)
    worker = next(child for child in demo.children() if "tokenmill_worker" in child.cmdline())

    worker.kill()

    assert demo.ends(60.0) != 0
    assert "Error: a worker ended" in demo.text
    assert "Traceback" not in demo.text, demo.text


def test_missing_packages_are_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo_command, "NEEDED", ("json", "no_such_package"))

    done = CliRunner().invoke(tokenmill, ["demo"])

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "Error: `tokenmill demo` needs no_such_package: pip install 'tokenmill[worker,embedded]'\n"
    )


def test_a_wrong_model_is_reported_in_one_line(folder: Path) -> None:
    demo = RunningDemo(folder, "--model", "./no-such-folder")

    assert demo.ends() == os.EX_CONFIG
    assert demo.text.startswith("Error: model: no such folder")
    assert demo.text.count("\n") == 1
