"""The ratios of a comparison as bars in one SVG file, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .acceptance import Verdict

WIDTH, LEFT, RIGHT, TOP, ROW = 900, 400, 90, 64, 26
AHEAD, BEHIND, MUST = "#059669", "#dc2626", "#1f2328"
TEXT, GRID = "#57606a", "#d0d7de"
TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
#: Ratios beyond are drawn at the edge, with their number beside them.
LEAST, MOST = TICKS[0], TICKS[-1]


def picture(title: str, verdicts: Sequence[Verdict]) -> str:
    """A bar for each verdict from 1 (equal) to how many times Tokenmill is ahead, on a logarithmic
    axis; a stroke where it must reach; a thin line from the worst pair to the best."""
    low, high = _axis(verdicts)
    height = TOP + len(verdicts) * ROW + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" fill="#1f2328">{escape(title)}</text>',
        f'<text x="16" y="44" fill="{TEXT}">times ahead of the other (lower figures where lower '
        "is better); stroke: what was promised</text>",
    ]
    bottom = TOP + len(verdicts) * ROW
    for tick in TICKS:
        if low <= tick <= high:
            x = _x(tick, low, high)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}" stroke="{GRID}"/>'
                f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{TEXT}">'
                f"{tick:g}×</text>"
            )
    for number, verdict in enumerate(verdicts):
        parts += _bar(verdict, TOP + number * ROW, low, high)
    return "\n".join([*parts, "</svg>", ""])


def _bar(verdict: Verdict, y: float, low: float, high: float) -> list[str]:
    ahead, *spread, must = (
        _x(_times_ahead(verdict, ratio), low, high)
        for ratio in (
            verdict.ratio, min(verdict.ratios), max(verdict.ratios), verdict.line.must,
        )
    )  # fmt: skip
    equal = _x(1.0, low, high)
    times = _times_ahead(verdict, verdict.ratio)
    left, width, middle = min(ahead, equal), max(abs(ahead - equal), 1.0), y + ROW / 2
    color = AHEAD if verdict.meets_must else BEHIND
    label = f"{verdict.line.name:2} {verdict.line.title}"
    return [
        f'<text x="{LEFT - 12}" y="{middle + 4:.1f}" text-anchor="end" fill="{TEXT}">'
        f"{escape(label)}</text>",
        f'<rect x="{left:.1f}" y="{y + 5:.1f}" width="{width:.1f}" height="{ROW - 10}" '
        f'fill="{color}"/>',
        f'<line x1="{min(spread):.1f}" x2="{max(spread):.1f}" y1="{middle:.1f}" '
        f'y2="{middle:.1f}" stroke="{MUST}"/>',
        f'<line x1="{must:.1f}" x2="{must:.1f}" y1="{y + 2:.1f}" y2="{y + ROW - 2:.1f}" '
        f'stroke="{MUST}" stroke-width="2"/>',
        f'<text x="{max(ahead, equal, must, *spread) + 6:.1f}" y="{middle + 4:.1f}" '
        f'fill="{color}">{times:.2f}×</text>',
    ]


def _times_ahead(verdict: Verdict, ratio: float) -> float:
    return 1 / ratio if verdict.line.lower else ratio


def _axis(verdicts: Sequence[Verdict]) -> tuple[float, float]:
    """The ticks around all the bars."""
    values = [1.0]
    for verdict in verdicts:
        values += [_times_ahead(verdict, each) for each in (*verdict.ratios, verdict.line.must)]
    low = max((tick for tick in TICKS if tick <= min(values)), default=LEAST)
    high = min((tick for tick in TICKS if tick >= max(values)), default=MOST)
    return low, max(high, 2.0)


def _x(value: float, low: float, high: float) -> float:
    value = min(max(value, low), high)
    share = math.log(value / low) / math.log(high / low)
    return LEFT + share * (WIDTH - LEFT - RIGHT)
