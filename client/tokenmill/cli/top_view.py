"""One screen of `tokenmill top`: the pool's line, curves, classes, workers, tenants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .snapshot import QueueSnapshot
from .tables import age, table

#: Refreshes that a curve looks back on.
CURVE_POINTS: Final = 60
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_BAR_CELLS: Final = 10
MOST_WORKERS: Final = 20
MOST_TENANTS: Final = 5


@dataclass(slots=True)
class Curves:
    """What the last refreshes saw."""

    tokens_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))
    queued: deque[float] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))

    def add(self, snapshot: QueueSnapshot) -> None:
        self.tokens_per_s.append(generated_per_s(snapshot))
        self.queued.append(snapshot.queued)


def screen(snapshot: QueueSnapshot, curves: Curves, *, title: str) -> RenderableType:
    """The whole screen; `title` names the pool and the moment."""
    parts: list[RenderableType] = [Text(title, style="bold"), _headline(snapshot)]
    if snapshot.is_paused:
        parts.append(Text(f"PAUSED for {age(snapshot.paused_s)}: nothing new starts", "bold red"))
    parts += [_curves(curves), "", _classes(snapshot)]
    if snapshot.workers:
        parts.append(_workers(snapshot.workers))
    else:
        parts.append(Text("no worker is alive in this pool: `tokenmill worker`", style="red"))
    if len(snapshot.tenants) > 1:
        parts.append(_tenants(snapshot.tenants))
    return Group(*parts)


def generated_per_s(snapshot: QueueSnapshot) -> float:
    """Of all workers, as their cards say."""
    return sum(number(card, "generated_per_s") for card in snapshot.workers)


def number(card: dict[str, Any], name: str) -> float:
    """A figure of a worker's card, which may be of another release."""
    value = card.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def curve(values: Iterable[float]) -> str:
    """One block for each value, the highest at full height."""
    values = list(values)
    highest = max(values, default=0)
    if highest <= 0:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[round(value / highest * (len(_BLOCKS) - 1))] for value in values)


def bar(share: float) -> str:
    """A gauge of fixed width; `share` from 0 to 1."""
    filled = round(max(0.0, min(1.0, share)) * _BAR_CELLS)
    return "█" * filled + "░" * (_BAR_CELLS - filled)


def _headline(snapshot: QueueSnapshot) -> Text:
    slots = sum(number(card, "slots") for card in snapshot.workers)
    rate = "" if snapshot.ends_per_s is None else f" · {snapshot.ends_per_s:.1f} requests/s end"
    return Text(
        f"{snapshot.queued} queued (oldest {age(snapshot.oldest_s)}) · "
        f"{snapshot.leased} running of {slots:.0f} · {generated_per_s(snapshot):.0f} tokens/s"
        f"{rate} · {snapshot.delayed} delayed · {snapshot.dead_letters} dead"
    )


def _curves(curves: Curves) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, values in (("tokens/s", curves.tokens_per_s), ("queued", curves.queued)):
        grid.add_row(name, curve(values), f"most {max(values, default=0):.0f}")
    return grid


def _classes(snapshot: QueueSnapshot) -> Table:
    depth = table("Waiting", "class", "ready", "held", "oldest")
    for row in snapshot.classes:
        depth.add_row(row.name, str(row.ready), str(row.held), age(row.oldest_s))
    return depth


def _workers(cards: Sequence[dict[str, Any]]) -> Table:
    rows = table("Workers", "worker", "state", "batch", "KV cache", "tokens/s", "model")
    for card in cards[:MOST_WORKERS]:
        running, slots = number(card, "running"), number(card, "slots")
        usage = number(card, "kv_usage")
        rows.add_row(
            escape(str(card.get("id", "–"))),
            escape(str(card.get("state", "–"))),
            f"{bar(running / slots if slots else 0)} {running:3.0f}/{slots:.0f}",
            f"{bar(usage)} {usage:4.0%}",
            f"{number(card, 'generated_per_s'):.0f}",
            escape(str(card.get("model", "–"))),
        )
    if len(cards) > MOST_WORKERS:
        rows.caption = f"and {len(cards) - MOST_WORKERS} more: --once --json has all"
    return rows


def _tenants(tenants: dict[str, int]) -> Table:
    rows = table("Tenants", "tenant", "queued")
    busiest = sorted(tenants.items(), key=lambda item: (-item[1], item[0]))
    for name, count in busiest[:MOST_TENANTS]:
        rows.add_row(escape(name), str(count))
    return rows
