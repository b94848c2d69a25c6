"""The form of log lines, and how errors are described in them."""

from __future__ import annotations

import json
import logging

import pytest

from tokenmill_worker.errors import describe
from tokenmill_worker.logs import fields, set_up_logging
from tokenmill_worker.phases import Phases


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "plain", "worker-1")

    logging.getLogger("x").info("ready", extra=fields(model="m", seconds=1.5))
    logging.getLogger("x").debug("hidden")

    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Z INFO ready model=m seconds=1.5")


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("debug", "json", "worker-1")

    logging.getLogger("x").debug("phase %s", "one", extra=fields(seconds=2))

    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {"level": "debug", "worker": "worker-1", "message": "phase one", "seconds": 2}


def test_libraries_do_not_log_what_they_work_on(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("debug", "plain", "worker-1")

    logging.getLogger("transformers.tokenization").warning("canary")

    assert "canary" not in capsys.readouterr().err


def test_phases_are_logged_with_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "plain", "worker-1")
    phases = Phases()

    phases("reading the configuration (/models/a)")
    phases("warm-up")
    phases("warm-up")
    phases.end()

    lines = capsys.readouterr().err.splitlines()
    shown = ("starting Python", "reading the configuration", "warm-up", "warm-up")
    assert [phase in line for phase, line in zip(shown, lines, strict=True)] == [True] * 4
    durations = phases.durations_s
    assert list(durations) == ["starting_python", "reading_the_configuration", "warm_up"]
    # The phases follow each other without a gap, from the start of this process on.
    assert sum(durations.values()) == pytest.approx(phases.seconds, abs=1)
    assert durations["starting_python"] > durations["warm_up"]


def test_an_error_is_described_by_type_and_place() -> None:
    try:
        int("canary")
    except ValueError as error:
        text = describe(error)

    assert text.startswith("ValueError in test_an_error_is_described_by_type_and_place (test_logs")
    assert "canary" not in text
