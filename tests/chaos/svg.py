"""Line charts over time as one SVG file, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP = 860, 64, 150, 56
PANEL, GAP = 120, 34
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626")
TEXT, GRID = "#57606a", "#d0d7de"


@dataclass(frozen=True)
class Panel:
    """One chart: a title with the unit, and name → (second, value) points."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def nice_maximum(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten, so that the axis has round numbers."""
    if value <= 0:
        return 1.0
    scale = 1.0
    while scale * 10 <= value:
        scale *= 10
    while scale > value:
        scale /= 10
    return next(scale * step for step in (1, 2, 5, 10) if scale * step >= value)


def chart(
    title: str, panels: Sequence[Panel], *, seconds: float, marks: Sequence[float] = ()
) -> str:
    """The panels one below the other on one axis of time; `marks` are ticks along the top."""
    height = TOP + len(panels) * (PANEL + GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#1f2328">{escape(title)}</text>',
    ]
    for second in marks:
        x = _x(second, seconds)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="32" y2="42" stroke="#dc2626" stroke-width="1"/>'
        )
    for index, panel in enumerate(panels):
        parts += _panel(panel, TOP + index * (PANEL + GAP) + 14, seconds)
    parts += _time_axis(height - 22, seconds)
    return "\n".join([*parts, "</svg>", ""])


def _x(second: float, seconds: float) -> float:
    return LEFT + second / seconds * (WIDTH - LEFT - RIGHT)


def _panel(panel: Panel, top: float, seconds: float) -> list[str]:
    most = nice_maximum(max((v for line in panel.series.values() for _, v in line), default=1))
    parts = [f'<text x="{LEFT}" y="{top - 6}" fill="#1f2328">{escape(panel.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = top + PANEL * (1 - share)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{GRID}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" fill="{TEXT}" text-anchor="end">'
            f"{most * share:g}</text>",
        ]
    for index, (name, line) in enumerate(panel.series.items()):
        color = COLORS[index % len(COLORS)]
        points = " ".join(
            f"{_x(second, seconds):.1f},{top + PANEL * (1 - value / most):.1f}"
            for second, value in line
        )
        label_y = top + 12 + 18 * index
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>',
            f'<text x="{WIDTH - RIGHT + 10}" y="{label_y}" fill="{color}">{escape(name)}</text>',
        ]
    return parts


def _time_axis(y: float, seconds: float) -> list[str]:
    step = max(nice_maximum(seconds / 10), 1)
    return [
        f'<text x="{_x(second, seconds):.1f}" y="{y}" fill="{TEXT}" text-anchor="middle">'
        f"{second:g} s</text>"
        for second in (step * number for number in range(int(seconds / step) + 1))
    ]
