"""`tokenmill queue pause`, `resume`, `purge`, `move`: what an operator does to a whole queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from tokenmill import limits
from tokenmill._link import Home
from tokenmill._requests import check_id, check_tenant
from tokenmill.keys import PRIORITIES, partition_of
from tokenmill.operator_calls import Waiting
from tokenmill.replies import MoveCode
from tokenmill.scripts import run

from .connection import Connection, connection_options, pass_connection
from .failures import fail
from .partitions import operator_calls, partitions, text
from .tables import age

#: Requests looked at in one round trip.
PAGE: Final = 500
_PRIORITY = click.Choice(list(PRIORITIES))
_WAITING_STATES: Final = frozenset({"held", "queued", "delayed"})


@click.command("pause", epilog="\b\nExample:\n  tokenmill queue pause --for-s 600")
@click.option("--for-s", type=click.FloatRange(0.001, 30 * 86_400), help="It ends by itself then.")
@connection_options()
@pass_connection
def pause_command(connection: Connection, /, for_s: float | None) -> None:
    """Let nothing new start in this pool.

    Requests are accepted, those that run go on, deadlines pass. What a worker gives back waits too.
    """
    with partitions(connection) as homes:
        for each in homes:
            run(each.redis, operator_calls(each).set_pause("pause", int((for_s or 0) * 1000)))
    until = "until `tokenmill queue resume`" if for_s is None else f"for {age(for_s)}"
    click.echo(f"pool {connection.pool} is paused {until}")


@click.command("resume", epilog="\b\nExample:\n  tokenmill queue resume")
@connection_options()
@pass_connection
def resume_command(connection: Connection, /) -> None:
    """Let a paused pool go on; workers notice within half a second."""
    with partitions(connection) as homes:
        was_paused = [run(each.redis, operator_calls(each).set_pause("resume")) for each in homes]
    click.echo(f"pool {connection.pool} {'goes on' if any(was_paused) else 'was not paused'}")


def _selection(command: Any) -> Any:
    """The options that say which waiting requests are meant."""
    for option in (
        click.option("--older-than-s", type=click.FloatRange(0), help="Enqueued so long ago."),
        click.option("--tenant", help="Of this tenant."),
        click.option("--priority", type=_PRIORITY, help="Of this class."),
    ):
        command = option(command)
    return command


@click.command(
    "purge",
    epilog="""\b
Examples:
  tokenmill queue purge --tenant acme --priority low
  tokenmill queue purge --older-than-s 3600 --yes
  tokenmill queue purge --all""",
)
@_selection
@click.option("--all", "everything", is_flag=True, help="All that wait.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connection_options()
@pass_connection
def purge_command(connection: Connection, /, everything: bool, yes: bool, **selection: Any) -> None:
    """Cancel waiting requests; their readers get the end event `cancelled`.

    Those that a worker has taken go on. Plain XADDs that no worker has read yet are not seen.
    """
    if everything is any(value is not None for value in selection.values()):
        raise click.UsageError("Say which: --priority, --tenant, --older-than-s; or --all.")
    with partitions(connection) as homes:
        chosen = [(each, _waiting(each, _meant(each, **selection))) for each in homes]
        count = sum(len(found) for _, found in chosen)
        if count and not yes:
            click.confirm(f"Cancel {count} waiting requests?", abort=True, err=True)
        ended = 0
        for each, found in chosen:
            meant = _meant(each, **selection)
            for batch in _batches(found):
                call = operator_calls(each).cancel_waiting(
                    batch, meant, message="purged by an operator"
                )
                ended += run(each.redis, call)
    click.echo(f"{ended} cancelled")


@click.command(
    "move",
    epilog="""\b
Examples:
  tokenmill queue move --to high 01JD… 01JE…
  tokenmill queue move --to low --tenant acme""",
)
@click.argument("request_ids", metavar="[ID...]", nargs=-1)
@click.option("--to", type=_PRIORITY, required=True, help="The class they get.")
@_selection
@connection_options()
@pass_connection
def move_command(
    connection: Connection, /, request_ids: tuple[str, ...], to: str, **selection: Any
) -> None:
    """Give waiting requests another priority; they stand last in their new class.

    Named ones, or those that the options choose. What was tried before goes first in any case.
    """
    if bool(request_ids) is any(value is not None for value in selection.values()):
        raise click.UsageError("Name the requests, or say --priority, --tenant, --older-than-s.")
    wanted = [check_id(request_id) for request_id in request_ids]
    codes: Counter[MoveCode] = Counter()
    with partitions(connection) as homes:
        for each in homes:
            here = [
                name for name in wanted if partition_of(name, len(homes)) == each.keys.partition
            ]
            found = here if request_ids else _waiting(each, _meant(each, **selection))
            for batch in _batches(found):
                replies = run(each.redis, operator_calls(each).move(batch, PRIORITIES[to]))
                codes.update(replies)
    click.echo(f"{codes[MoveCode.MOVED]} moved, {codes[MoveCode.SAME]} had priority {to} before")
    left = codes[MoveCode.TAKEN] + codes[MoveCode.UNKNOWN]
    if request_ids and left:
        fail(f"{left} not moved: a worker has them, they have ended, or there is none")


def _meant(
    where: Home, *, priority: str | None, tenant: str | None, older_than_s: float | None
) -> Waiting:
    created_before_ms = 0
    if older_than_s is not None:
        seconds, microseconds = text(where.redis.time())
        created_before_ms = int(seconds * 1000 + microseconds / 1000 - older_than_s * 1000)
    return Waiting(
        ready_class="" if priority is None else PRIORITIES[priority],
        tenant="" if tenant is None else check_tenant(tenant),
        created_before_ms=created_before_ms,
    )


def _waiting(where: Home, meant: Waiting) -> list[str]:
    """Ids of the waiting requests that are meant now; every living one has a deadline."""
    ids: list[str] = text(where.redis.zrange(where.keys.deadlines, 0, -1))
    return [
        request_id
        for first in range(0, len(ids), PAGE)
        for request_id in _meant_of(where, ids[first : first + PAGE], meant)
    ]


def _meant_of(where: Home, ids: Sequence[str], meant: Waiting) -> Iterator[str]:
    with where.redis.pipeline(transaction=False) as pipeline:
        for request_id in ids:
            pipeline.hmget(where.keys.record(request_id), ["state", "class", "tenant", "created"])
        records = pipeline.execute()
    for request_id, (state, ready_class, tenant, created) in zip(ids, records, strict=True):
        if (
            state in _WAITING_STATES
            and meant.ready_class in ("", ready_class)
            and meant.tenant in ("", tenant)
            and (not meant.created_before_ms or int(created) < meant.created_before_ms)
        ):
            yield request_id


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    most = limits.MAX_REQUESTS_PER_SWEEP
    return (ids[first : first + most] for first in range(0, len(ids), most))
