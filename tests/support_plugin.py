"""A command as another package would plug it in."""

from __future__ import annotations

import click


@click.command()
@click.option("--pool")
def command(pool: str | None) -> None:
    click.echo(f"pool {pool}")
