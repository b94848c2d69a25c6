"""How the streams are shown: side by side in a terminal, line by line elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .streams import StreamRecord

#: In lines of plain text, a piece is shown once it is at least this long, at the end of a word.
PIECE_CHARS = 48
WIDE_ENOUGH_FOR_TWO_COLUMNS = 100
MOST_PANEL_LINES = 10


class View(Protocol):
    """Entered around the streams; `on_text` is called as in `stream_all`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def on_text(self, record: StreamRecord, text: str) -> None: ...


def make_view(console: Console, records: Sequence[StreamRecord]) -> View:
    return LiveView(console, records) if console.is_terminal else LineView(console)


class LiveView:
    """A panel for each request with the end of its text, redrawn ten times a second."""

    def __init__(self, console: Console, records: Sequence[StreamRecord]) -> None:
        self._console = console
        self._records = records
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=10, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_text(self, record: StreamRecord, text: str) -> None:
        """Nothing to do: the panels are drawn from the records."""

    def _render(self) -> Table:
        columns = 2 if self._console.width >= WIDE_ENOUGH_FOR_TWO_COLUMNS else 1
        rows = -(-len(self._records) // columns)
        height = min(max((self._console.height - 1) // rows, 3), MOST_PANEL_LINES)
        width = self._console.width // columns
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [self._panel(record, width - 4, height) for record in self._records]
        panels += [Panel(Text(), height=height)] * (rows * columns - len(panels))
        for start in range(0, len(panels), columns):
            grid.add_row(*panels[start : start + columns])
        return grid

    def _panel(self, record: StreamRecord, width: int, height: int) -> Panel:
        lines = [
            line
            for paragraph in record.text.splitlines()
            for line in textwrap.wrap(paragraph, width) or [""]
        ]
        state = record.finish_reason or ("waiting" if record.first_token_s is None else "…")
        return Panel(
            Text("\n".join(lines[-(height - 2) :]), no_wrap=True),
            title=f"{record.number}: {' '.join(record.question.split())[: width - 6]}",
            title_align="left",
            subtitle=f"{record.num_tokens} tokens, {state}",
            subtitle_align="right",
            height=height,
            border_style="green" if record.finish_reason else "default",
        )


class LineView:
    """`[number] piece` whenever a request has a piece of text, so that the streams interleave."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()

    def on_text(self, record: StreamRecord, text: str) -> None:
        waiting = self._waiting.get(record.number, "") + text
        piece, rest = (waiting, "") if not text else _cut(waiting)
        self._waiting[record.number] = rest
        if piece.strip():
            self._say(record.number, " ".join(piece.split()))
        if not text:
            self._say(record.number, f"– {record.num_tokens} tokens, {record.finish_reason} –")

    def _say(self, number: int, piece: str) -> None:
        self._console.print(Text(f"[{number}] {piece}"), soft_wrap=True)


def _cut(text: str) -> tuple[str, str]:
    """Whole words of a text that is long enough to show, and the rest."""
    if len(text) < PIECE_CHARS:
        return "", text
    head, space, tail = text.rpartition(" ")
    return (head, space + tail) if head else (text, "")
