"""The figures at the end of the demo."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .engine_steps import EngineSteps
from .streams import StreamRecord


def report_table(records: Sequence[StreamRecord]) -> Table:
    table = Table(title="Requests", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("prompt", max_width=28, no_wrap=True, overflow="ellipsis")
    for name in ("first token", "tokens", "tokens/s", "finish"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            str(record.number),
            " ".join(record.question.split()),
            _with_unit(record.time_to_first_token_s, ".2f", " s"),
            str(record.num_tokens),
            _with_unit(record.tokens_per_s, ".1f", ""),
            record.finish_reason,
        )
    return table


def total_line(records: Sequence[StreamRecord], steps: EngineSteps) -> str:
    """Throughput from the first request sent to the last one ended, and the engine's batch."""
    tokens = sum(record.num_tokens for record in records)
    wall_s = max(r.ended_s or r.started_s for r in records) - min(r.started_s for r in records)
    line = f"{tokens} tokens in {wall_s:.1f} s: {tokens / wall_s:.1f} tokens/s in total"
    if steps.mean_batch_size is None:
        return line
    return f"{line}; {steps.mean_batch_size:.1f} sequences per engine step ({steps.steps} steps)"


def _with_unit(value: float | None, form: str, unit: str) -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
