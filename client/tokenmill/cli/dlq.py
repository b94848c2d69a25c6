"""`tokenmill dlq`: requests that were given up, and what to do with them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape

from tokenmill import UnknownRequest, limits
from tokenmill._link import Home
from tokenmill._requests import check_id
from tokenmill.dead_letters import DeadLetter
from tokenmill.keys import partition_of
from tokenmill.replies import RequeueStatus
from tokenmill.scripts import run

from .connection import Connection, connection_options, pass_connection
from .failures import fail
from .partitions import home, operator_calls, partitions, text
from .tables import age, table

_REFUSALS = {
    RequeueStatus.NO_BODY: "its body was not kept, so it cannot be queued again",
    RequeueStatus.NOT_DEAD: "it is not dead",
    RequeueStatus.UNKNOWN: "there is no such request, or its retention is over",
}


@click.group(
    "dlq",
    short_help="Dead letters: list, show, requeue, purge.",
    epilog="""\b
Examples:
  tokenmill dlq list
  tokenmill dlq show 01JD…
  tokenmill dlq requeue 01JD… 01JE…
  tokenmill dlq purge --all""",
)
@connection_options()
def dlq_command() -> None:
    """Requests that were given up: they took several workers down, or never got anywhere.

    A dead request can be queued again as long as its body is kept (a day, unless the workers were
    told otherwise).
    """


@dlq_command.command("list", epilog="\b\nExample:\n  tokenmill dlq list --json | jq -r '.[].id'")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="The latest.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list, for scripts.")
@connection_options()
@pass_connection
def list_command(connection: Connection, /, limit: int, as_json: bool) -> None:
    """List dead letters, the latest first."""
    with partitions(connection) as homes:
        letters = sorted(
            (letter for each in homes for letter in _latest(each, limit)),
            key=lambda letter: letter.died_ms,
            reverse=True,
        )[:limit]
    if as_json:
        click.echo(json.dumps([_as_dict(letter) for letter in letters]))
        return
    if not letters:
        click.echo("no dead letters")
        return
    rows = table("Dead letters", "id", "tenant", "why", "attempts", "age")
    for letter in letters:
        names = (letter.request_id, letter.tenant, letter.why, str(letter.attempts))
        rows.add_row(*map(escape, names), _age(letter))
    Console().print(rows)


@dlq_command.command(
    "show",
    epilog="""\b
Examples:
  tokenmill dlq show 01JD…
  tokenmill dlq show 01JD… --body > body.json   # to try it on a worker of your own""",
)
@click.argument("request_id", metavar="ID")
@click.option("--body", "with_body", is_flag=True, help="The request's body, and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options()
@pass_connection
def show_command(
    connection: Connection, /, request_id: str, with_body: bool, as_json: bool
) -> None:
    """Show one dead letter: why and when it died, and what happened before.

    The body, which holds the prompt, is shown only if asked for.
    """
    with home(connection, check_id(request_id)) as (client, where):
        letter, body = _letter(where, request_id), _body(where, request_id)
        try:
            explanation = client.explain(request_id)
        except UnknownRequest:
            explanation = None
    if with_body:
        click.echo(body if body is not None else fail(f"{request_id}: its body was not kept"))
    elif letter is None:
        fail(f"no dead letter of {request_id}")
    elif as_json:
        facts = {**_as_dict(letter), "can_be_queued_again": body is not None}
        told = json.loads(explanation.model_dump_json()) if explanation else None
        click.echo(json.dumps({**facts, "explanation": told}))
    else:
        click.echo(f"{letter.why} after {letter.attempts} attempts, {_age(letter)} ago")
        click.echo(f"tenant {letter.tenant}, last worker {letter.worker}")
        click.echo("can be queued again" if body is not None else "its body was not kept")
        for entry in explanation.timeline if explanation else ():
            click.echo(f"  {entry}")


@dlq_command.command("requeue", epilog="\b\nExample:\n  tokenmill dlq requeue 01JD… 01JE…")
@click.argument("request_ids", metavar="[ID...]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@connection_options()
@pass_connection
def requeue_command(
    connection: Connection, /, request_ids: tuple[str, ...], everything: bool
) -> None:
    """Give dead requests another life, with the same id, body and terms."""
    _require_one_of(request_ids, everything)
    refused = 0
    with partitions(connection) as homes:
        chosen = _chosen(homes, request_ids)
        if not chosen:
            click.echo("no dead letters")
        for where, request_id in chosen:
            reply = run(where.redis, operator_calls(where).requeue_dead(request_id))
            refused += reply.status is not RequeueStatus.OK
            outcome = _REFUSALS.get(reply.status, f"{reply.state} again")
            click.echo(f"{request_id} {outcome}")
    if refused:
        fail(f"{refused} not queued again")


@dlq_command.command(
    "purge",
    epilog="""\b
Examples:
  tokenmill dlq purge 01JD…
  tokenmill dlq purge --all --yes""",
)
@click.argument("request_ids", metavar="[ID...]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connection_options()
@pass_connection
def purge_command(
    connection: Connection, /, request_ids: tuple[str, ...], everything: bool, yes: bool
) -> None:
    """Forget dead letters and their requests, body and log included."""
    _require_one_of(request_ids, everything)
    wanted = {check_id(request_id) for request_id in request_ids}
    with partitions(connection) as homes:
        found = [
            (each, [one for one in _latest(each) if everything or one.request_id in wanted])
            for each in homes
        ]
        count = sum(len(letters) for _, letters in found)
        if count and not yes:
            click.confirm(f"Forget {count} dead letters and their requests?", abort=True, err=True)
        removed = sum(_purge(each, letters) for each, letters in found)
    click.echo(f"{removed} forgotten")
    missing = wanted - {letter.request_id for _, letters in found for letter in letters}
    if missing:
        fail(f"no dead letter of {', '.join(sorted(missing))}")


def _require_one_of(request_ids: Sequence[str], everything: bool) -> None:
    if bool(request_ids) is everything:
        raise click.UsageError("Name the requests, or say --all.")


def _chosen(homes: Sequence[Home], request_ids: Sequence[str]) -> list[tuple[Home, str]]:
    """The dead requests to act on, each with its partition; without ids all of them."""
    if not request_ids:
        return [(each, letter.request_id) for each in homes for letter in _latest(each)]
    ids = [check_id(request_id) for request_id in request_ids]
    return [(homes[partition_of(name, len(homes))], name) for name in ids]


def _latest(where: Home, limit: int | None = None) -> list[DeadLetter]:
    return DeadLetter.parse_all(text(where.redis.xrevrange(where.keys.dead_letters, count=limit)))


def _letter(where: Home, request_id: str) -> DeadLetter | None:
    """The latest: a request may have died, been queued again and died again."""
    return next((one for one in _latest(where) if one.request_id == request_id), None)


def _body(where: Home, request_id: str) -> str | None:
    body: str | None = text(where.redis.hget(where.keys.record(request_id), "body"))
    return body or None


def _purge(where: Home, letters: Sequence[DeadLetter]) -> int:
    most = limits.MAX_LETTERS_PER_PURGE
    parts = [letters[first : first + most] for first in range(0, len(letters), most)]
    return sum(run(where.redis, operator_calls(where).purge(part)) for part in parts)


def _as_dict(letter: DeadLetter) -> dict[str, object]:
    facts = asdict(letter)
    return {"id": facts.pop("request_id"), "died_ms": letter.died_ms, **facts}


def _age(letter: DeadLetter) -> str:
    return age(max(0.0, time.time() - letter.died_ms / 1000))
