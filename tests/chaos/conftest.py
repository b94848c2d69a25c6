"""The rig of a scenario, and the table of all at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.rig import Rig, build_rig
from chaos.table import Row, render

OUTCOMES = {"passed": "ok", "failed": "FAIL", "error": "FAIL", "skipped": "skip"}


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """This scenario's line in the table."""
    row = Row(request.node.name.removeprefix("test_"))
    request.node.user_properties.append(("row", row))
    return row


@pytest.fixture
def make_rig(row: Row, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Rigs that are taken down at the end; see `build_rig`."""
    with ExitStack() as stack:

        def make(**options: Any) -> Rig:
            rig = build_rig(row, tmp_path, **options)
            stack.callback(rig.close)
            return rig

        yield make


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows: dict[str, Row] = {}
    for outcome, word in OUTCOMES.items():
        for report in terminalreporter.stats.get(outcome, []):
            row = dict(getattr(report, "user_properties", ())).get("row")
            if isinstance(row, Row):
                row.outcome = word
                if word == "skip" and isinstance(report.longrepr, tuple):
                    row.note = report.longrepr[2].removeprefix("Skipped: ")
                rows[row.scenario] = row
    if rows:
        terminalreporter.section("scenarios")
        in_order = sorted(rows.values(), key=lambda row: row.order)
        terminalreporter.write_line(render(in_order))
