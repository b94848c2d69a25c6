"""`tokenmill doctor`: the findings of all checks, for people or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import click

from tokenmill._redis import is_cluster
from tokenmill.cli.connection import Connection, connection_options, pass_connection
from tokenmill.cli.partitions import partitions
from tokenmill.errors import TokenmillError

from .examination import Report, examine, examine_machine
from .finding import Finding, exit_status, ranked
from .subject import Subject

_COLORS: Final = {"error": "red", "warning": "yellow", "note": "cyan"}
_INDENT: Final = " " * 9


@click.command(
    "doctor",
    short_help="Find out what is wrong, and what to do about it.",
    epilog="""\b
Examples:
  tokenmill doctor
  tokenmill doctor --json | jq -r '.findings[] | .check + ": " + .way_out'
  tokenmill doctor --no-machine        # Redis and the queue only
\b
Exit status: 0 nothing to do · 1 warnings · 2 errors""",
)
@click.option(
    "--machine/--no-machine",
    default=True,
    help="Look at this machine as well, if the worker is installed: model, kernels, disk, limits.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options()
@pass_connection
def doctor_command(connection: Connection, /, machine: bool, as_json: bool) -> None:
    """Check Redis, the way to it, the queue and this machine.

    Changes nothing. Every finding says how bad it is, what was seen, and the way out.
    """
    reports = [_examine_queue(connection)]
    if machine:
        reports.append(examine_machine())
    findings = ranked(finding for report in reports for finding in report.findings)
    looked_at = [name for report in reports for name in report.looked_at]
    if as_json:
        found = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": found, "looked_at": looked_at}))
    else:
        _print(findings, looked_at)
    raise click.exceptions.Exit(exit_status(findings))


def _examine_queue(connection: Connection) -> Report:
    try:
        with partitions(connection) as homes:
            return examine(Subject(homes, is_cluster(connection.redis_url)))
    except TokenmillError as error:
        return Report([_unreachable(error)], [])


def _unreachable(error: TokenmillError) -> Finding:
    problem, _, way_out = str(error).partition("; ")
    return Finding(
        severity="error",
        check="connection",
        problem="Redis cannot be used, so neither it nor the queue was checked",
        evidence=problem,
        way_out=way_out or "start Redis, or name the right one with --redis-url",
    )


def _print(findings: Sequence[Finding], looked_at: Sequence[str]) -> None:
    for finding in findings:
        severity = click.style(f"{finding.severity:8}", fg=_COLORS[finding.severity], bold=True)
        click.echo(f"{severity} {finding.check}: {finding.problem}")
        click.echo(f"{_INDENT}seen: {finding.evidence}")
        click.echo(f"{_INDENT}do:   {finding.way_out}")
    counts = Counter(finding.severity for finding in findings)
    words = [f"{count} {name}s" if count != 1 else f"1 {name}" for name, count in counts.items()]
    found = ", ".join(words) or "nothing to complain about"
    click.echo(f"{found}; looked at: {', '.join(looked_at) or 'nothing'}")
