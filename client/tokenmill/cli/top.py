"""`tokenmill top`: what the queue and its workers do, as it happens."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import datetime

import click
from rich.console import Console
from rich.live import Live

from tokenmill._redis_errors import REDIS_ERRORS, is_retryable

from .connection import Connection, connection_options, pass_connection
from .partitions import partitions
from .snapshot import QueueSnapshot, read_snapshot
from .top_view import Curves, generated_per_s, screen


@click.command(
    "top",
    short_help="Watch queue and workers live.",
    epilog="""\b
Examples:
  tokenmill top
  tokenmill top --once               # one screen, for a log
  tokenmill top --once --json | jq '.generated_per_s, .oldest_s'
\b
Ctrl-C ends it.""",
)
@click.option("--every-s", type=click.FloatRange(0.1), default=1.0, show_default=True)
@click.option("--once", is_flag=True, help="One look, then end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: one JSON object, for scripts.")
@connection_options()
@pass_connection
def top_command(connection: Connection, /, every_s: float, once: bool, as_json: bool) -> None:
    """Show queue, workers, batch and KV cache use, and tokens per second, live.

    Everything is read from Redis: no worker is asked. What a worker says of itself is as old as
    its card, a few seconds at most.
    """
    if as_json and not once:
        raise click.UsageError("--json is for --once; `watch` repeats it.")
    curves = Curves()
    with partitions(connection) as homes:
        snapshot = read_snapshot(homes)
        curves.add(snapshot)
        if as_json:
            click.echo(json.dumps(_as_dict(snapshot)))
            return
        title = _title(connection)
        if once:
            Console().print(screen(snapshot, curves, title=title))
            return
        with Live(screen(snapshot, curves, title=title), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                title = _title(connection)
                try:
                    snapshot = read_snapshot(homes)
                except REDIS_ERRORS as error:
                    if not is_retryable(error):
                        raise
                    title += " · REDIS IS AWAY, this is what was seen last"
                else:
                    curves.add(snapshot)
                live.update(screen(snapshot, curves, title=title), refresh=True)


def _title(connection: Connection) -> str:
    return f"tokenmill · pool {connection.pool} · {datetime.now():%H:%M:%S}"


def _as_dict(snapshot: QueueSnapshot) -> dict[str, object]:
    return {
        **asdict(snapshot),
        "oldest_s": snapshot.oldest_s,
        "is_paused": snapshot.is_paused,
        "generated_per_s": generated_per_s(snapshot),
    }
