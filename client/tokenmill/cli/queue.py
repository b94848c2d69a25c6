"""`tokenmill queue`: what waits, what runs, and who works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenmill._redis import connect, redis_url
from tokenmill._redis_errors import translated

from .connection import Connection, connection_options, pass_connection
from .snapshot import QueueSnapshot, read_snapshot

#: A fuller list is in --json.
MOST_TENANTS_SHOWN = 20


@click.command(
    "queue",
    epilog="""\b
Examples:
  tokenmill queue
  watch -n 1 tokenmill --pool chat queue
  tokenmill queue --json | jq .queued""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options()
@pass_connection
def queue_command(connection: Connection, /, as_json: bool) -> None:
    """Show depth by class, tenants and workers."""
    url = redis_url(connection.redis_url)
    with translated(url), closing(connect(url, connection.redis_options)) as client:
        snapshot = read_snapshot(client, connection.keys)
    if as_json:
        click.echo(json.dumps({**asdict(snapshot), "oldest_s": snapshot.oldest_s}))
        return
    console = Console()
    console.print(
        f"{snapshot.queued} queued, {snapshot.leased} running, {snapshot.delayed} to be retried, "
        f"{snapshot.dead_letters} dead",
        highlight=False,
    )
    for table in _tables(snapshot):
        console.print(table)
    if not snapshot.workers:
        console.print("no worker is alive in this pool: start one with `tokenmill worker`")


def _tables(snapshot: QueueSnapshot) -> Iterator[Table]:
    depth = _table("Waiting", "class", "ready", "held", "oldest")
    for row in snapshot.classes:
        depth.add_row(row.name, str(row.ready), str(row.held), _age(row.oldest_s))
    yield depth
    if snapshot.tenants:
        tenants = _table("Tenants", "tenant", "queued")
        busiest = sorted(snapshot.tenants.items(), key=lambda item: (-item[1], item[0]))
        for name, count in busiest[:MOST_TENANTS_SHOWN]:
            tenants.add_row(escape(name), str(count))
        yield tenants
    if snapshot.workers:
        workers = _table("Workers", "worker", "state", "model", "running")
        for card in snapshot.workers:
            workers.add_row(*(_cell(card, name) for name in ("id", "state", "model", "running")))
        yield workers


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def _cell(card: dict[str, Any], name: str) -> str:
    return escape(str(card.get(name, "–")))


def _age(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f} s"
