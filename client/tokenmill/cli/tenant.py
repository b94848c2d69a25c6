"""`tokenmill tenant`: who shares the queue, and in which proportion."""

from __future__ import annotations

import json
from collections import Counter

import click
from rich.console import Console
from rich.markup import escape

from tokenmill import limits
from tokenmill._requests import check_tenant
from tokenmill.scripts import run

from .connection import Connection, connection_options, pass_connection
from .partitions import operator_calls, partitions
from .tables import table


@click.group(
    "tenant",
    short_help="Tenants: list, weight.",
    epilog="""\b
Examples:
  tokenmill tenant list
  tokenmill tenant weight acme 4""",
)
@connection_options()
def tenant_command() -> None:
    """Who shares the queue, and in which proportion.

    Of each tenant so many requests are ready at a time, the others wait in a line of its own: 16,
    times the tenant's weight. So a tenant of weight 4 gets four places where others get one.
    """


@tenant_command.command("list", epilog="\b\nExample:\n  tokenmill tenant list --json")
@click.option("--json", "as_json", is_flag=True, help="A JSON list, for scripts.")
@connection_options()
@pass_connection
def list_command(connection: Connection, /, as_json: bool) -> None:
    """List tenants that have waiting requests or a weight of their own."""
    queued: Counter[str] = Counter()
    weights: dict[str, int] = {}
    with partitions(connection) as homes:
        for each in homes:
            for share in run(each.redis, operator_calls(each).tenants()):
                queued[share.tenant] += share.queued
                weights[share.tenant] = share.weight
    if as_json:
        shares = [
            {"tenant": name, "weight": weights[name], "queued": queued[name]}
            for name in sorted(weights)
        ]
        click.echo(json.dumps(shares))
        return
    rows = table("Tenants", "tenant", "weight", "queued")
    for name in sorted(weights):
        rows.add_row(escape(name), str(weights[name]), str(queued[name]))
    Console().print(rows if weights else "no tenant has waiting requests or a weight of its own")


@tenant_command.command(
    "weight",
    epilog="""\b
Examples:
  tokenmill tenant weight acme        # show it
  tokenmill tenant weight acme 4      # four places where others get one
  tokenmill tenant weight acme 1      # as everybody""",
)
@click.argument("tenant", metavar="NAME")
@click.argument(
    "weight", metavar="[N]", type=click.IntRange(1, limits.MAX_TENANT_WEIGHT), required=False
)
@connection_options()
@pass_connection
def weight_command(connection: Connection, /, tenant: str, weight: int | None) -> None:
    """Show the weight of a tenant, or set it to N (1 to 100)."""
    check_tenant(tenant)
    with partitions(connection) as homes:
        if weight is None:
            shares = [run(each.redis, operator_calls(each).tenants()) for each in homes]
            known = {share.tenant: share.weight for part in shares for share in part}
            click.echo(known.get(tenant, 1))
            return
        before = [
            run(each.redis, operator_calls(each).set_weight(tenant, weight)) for each in homes
        ]
    click.echo(f"{tenant}: {weight}, was {max(before)}")
