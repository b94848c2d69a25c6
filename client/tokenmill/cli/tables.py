"""How tables look."""

from __future__ import annotations

from rich.table import Table


def table(title: str, *columns: str) -> Table:
    """An empty table; names to the left, numbers to the right."""
    made = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right")
    return made


def age(seconds: float | None) -> str:
    """A time that has passed, in the unit that fits it."""
    if seconds is None:
        return "–"
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"
