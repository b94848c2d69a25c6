"""`tokenmill queue`: what waits, what runs, and who works; the commands that change it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .connection import Connection, connection_options
from .partitions import partitions
from .queue_control import move_command, pause_command, purge_command, resume_command
from .snapshot import QueueSnapshot, read_snapshot
from .tables import age, table

#: A fuller list is in --json.
MOST_TENANTS_SHOWN = 20


@click.group(
    "queue",
    invoke_without_command=True,
    short_help="What waits and who works; pause, resume, purge, move.",
    epilog="""\b
Examples:
  tokenmill queue
  tokenmill queue pause --for-s 600
  tokenmill queue purge --tenant acme
  tokenmill queue move --to high 01JD…
  watch -n 1 tokenmill --pool chat queue
  tokenmill queue --json | jq .queued""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options()
@click.pass_context
def queue_command(context: click.Context, /, as_json: bool) -> None:
    """Show depth by class, tenants and workers; or change what waits."""
    if context.invoked_subcommand is None:
        _show(context.ensure_object(Connection), as_json=as_json)
    elif as_json:
        raise click.UsageError("--json belongs to `tokenmill queue` alone.")


def _show(connection: Connection, *, as_json: bool) -> None:
    with partitions(connection) as homes:
        snapshot = read_snapshot(homes)
    if as_json:
        click.echo(
            json.dumps(
                {**asdict(snapshot), "oldest_s": snapshot.oldest_s, "is_paused": snapshot.is_paused}
            )
        )
        return
    console = Console()
    console.print(
        f"{snapshot.queued} queued, {snapshot.leased} running, {snapshot.delayed} delayed, "
        f"{snapshot.dead_letters} dead",
        highlight=False,
    )
    if snapshot.is_paused:
        console.print(f"PAUSED for {age(snapshot.paused_s)}: nothing new starts", style="bold red")
    for each in _tables(snapshot):
        console.print(each)
    if not snapshot.workers:
        console.print("no worker is alive in this pool: start one with `tokenmill worker`")


def _tables(snapshot: QueueSnapshot) -> Iterator[Table]:
    depth = table("Waiting", "class", "ready", "held", "oldest")
    for row in snapshot.classes:
        depth.add_row(row.name, str(row.ready), str(row.held), age(row.oldest_s))
    yield depth
    if snapshot.tenants:
        tenants = table("Tenants", "tenant", "queued")
        busiest = sorted(snapshot.tenants.items(), key=lambda item: (-item[1], item[0]))
        for name, count in busiest[:MOST_TENANTS_SHOWN]:
            tenants.add_row(escape(name), str(count))
        yield tenants
    if snapshot.workers:
        workers = table("Workers", "worker", "state", "model", "running")
        for card in snapshot.workers:
            workers.add_row(*(_cell(card, name) for name in ("id", "state", "model", "running")))
        yield workers


def _cell(card: dict[str, Any], name: str) -> str:
    return escape(str(card.get(name, "–")))


for each in (pause_command, resume_command, purge_command, move_command):
    queue_command.add_command(each)
