"""Two charts of the scale runs in one SVG: the model beside the runs, and where a core ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from .scale_model import Model, shape_of
from .scale_run import Row

WIDTH, HEIGHT, PANEL, TOP, BOTTOM = 900, 430, 360, 70, 50
LEFTS = (70, 520)
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
TEXT, GRID = "#57606a", "#d0d7de"
TOKENS_PER_EVENT = (1.0, 2.0, 4.0, 8.0, 16.0)
BATCHES = (8, 64, 128)
ANSWER_TOKENS = 200.0
#: The second chart is of a pool of so many workers.
WORKERS = 16

Points = Sequence[tuple[float, float]]


def picture(title: str, model: Model, rows: Sequence[Row]) -> str:
    """Left: µs of Redis per token, measured against the model; right: tokens per second of one
    core for each number of tokens per event."""
    runs = [row for row in rows if not row.scenario.kills]
    fitted: dict[str, list[tuple[float, float]]] = {}
    for row in runs:
        batch, tokens, per_event = shape_of(row)
        expected = model.redis_us(batch=batch, tokens=tokens, tokens_per_event=per_event)
        fitted.setdefault(row.scenario.name, []).append((expected, row.redis_us))
    ends = {
        f"{batch} streams per worker": [
            (
                each,
                model.tok_s_of_a_core(
                    workers=WORKERS, batch=batch, tokens=ANSWER_TOKENS, tokens_per_event=each
                ),
            )
            for each in TOKENS_PER_EVENT
        ]
        for batch in BATCHES
    }
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="system-ui, sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="16" y="24" font-size="15" fill="#1f2328">{escape(title)}</text>',
            *_chart(LEFTS[0], "Redis, µs per token: model (across), run (up)", fitted, dots=True),
            *_chart(LEFTS[1], "tokens/s of one Redis core, by tokens per event", ends),
            "</svg>",
            "",
        ]
    )


def _chart(left: float, title: str, series: Mapping[str, Points], dots: bool = False) -> list[str]:
    """Both axes are logarithmic. `dots`: unconnected, around the diagonal where both are equal."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    if dots:  # one scale for both
        xs = ys = [*xs, *ys]
    across, up = _decades(xs), _decades(ys)
    bottom = HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + PANEL * _share(x, across),
            bottom - (bottom - TOP) * _share(y, up),
        )

    parts = [f'<text x="{left}" y="{TOP - 14}" fill="#1f2328">{escape(title)}</text>']
    for value in across:
        x, _ = at(value, up[0])
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{GRID}"/>'
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="{TEXT}">{value:g}'
            "</text>"
        )
    for value in up:
        _, y = at(across[0], value)
        parts.append(
            f'<line x1="{left}" x2="{left + PANEL}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{TEXT}">{value:g}</text>'
        )
    if dots:
        (x0, y0), (x1, y1) = at(across[0], across[0]), at(across[-1], across[-1])
        parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{TEXT}"/>'
        )
    for number, (name, points) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        places = [at(x, y) for x, y in points]
        if not dots:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
        parts.append(
            f'<text x="{left + 10}" y="{TOP + 18 + 16 * number}" fill="{color}">{escape(name)}'
            "</text>"
        )
    return parts


def _decades(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten, around all the values."""
    low = 10.0 ** math.floor(math.log10(min(values)))
    steps = [low * step * 10**power for power in range(9) for step in (1, 2, 5)]
    first = max(number for number, step in enumerate(steps) if step <= min(values))
    last = next(number for number, step in enumerate(steps) if step >= max(values))
    return steps[first : max(last, first + 1) + 1]


def _share(value: float, ticks: Sequence[float]) -> float:
    return math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])
