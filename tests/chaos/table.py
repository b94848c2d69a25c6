"""What a scenario found, and the table at the end of `make chaos`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

HEADINGS = (
    "scenario", "requests", "faults", "re-queued", "rewinds", "lost", "duplicated", "seconds", "",
)  # fmt: skip

_NUMBERS = count()


@dataclass
class Row:
    """`lost` and `duplicated` count tokens that a client missed or got twice, and streams without
    their one end; `requeued` the leases beyond each request's first; `rewinds` what the SDK
    withdrew, which only a loss of data in Redis may cause."""

    scenario: str
    requests: int = 0
    faults: int = 0
    requeued: int = 0
    rewinds: int = 0
    lost: int = 0
    duplicated: int = 0
    seconds: float = 0.0
    note: str = ""
    outcome: str = ""
    order: int = field(default_factory=_NUMBERS.__next__)

    def cells(self) -> tuple[str, ...]:
        counts = (self.requests, self.faults, self.requeued, self.rewinds, self.lost)
        end = f"{self.outcome}{'  ' if self.note else ''}{self.note}"
        return (
            self.scenario, *map(str, counts), str(self.duplicated), f"{self.seconds:.1f}", end,
        )  # fmt: skip


def render(rows: Sequence[Row]) -> str:
    """Aligned text: names to the left, numbers to the right."""
    cells = [HEADINGS, *(row.cells() for row in rows), _total(rows).cells()]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    last = len(HEADINGS) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in {0, last} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _total(rows: Sequence[Row]) -> Row:
    failed = sum(row.outcome == "FAIL" for row in rows)
    skipped = sum(row.outcome == "skip" for row in rows)
    names = ("requests", "faults", "requeued", "rewinds", "lost", "duplicated", "seconds")
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    passed = len(rows) - failed - skipped
    outcome = f"{passed} passed, {failed} failed, {skipped} skipped"
    return Row("total", **sums, outcome=outcome)  # type: ignore[arg-type]
