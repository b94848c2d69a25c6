"""Commands on single requests: submit, stream, status, explain, result, cancel."""

from __future__ import annotations

import json
from typing import Any

import click

from tokenmill import Status
from tokenmill.protocol import Completion

from .connection import Connection, connection_options, pass_connection
from .options import given, read_prompt, request_options, sampling_options
from .printing import print_stream


@click.command(
    "submit",
    short_help="Put a prompt into the queue and print its id.",
    epilog="""\b
Examples:
  id=$(tokenmill submit "Once upon a time" --max-tokens 400 --priority low)
  tokenmill stream "$id"
  tokenmill submit --chat "Hi" --request-id order-17   # again: the same request""",
)
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="PROMPT is a user's message for the chat template.")
@sampling_options
@request_options
@click.option("--json", "as_json", is_flag=True, help="Id, and whether it is new, as JSON.")
@connection_options()
@pass_connection
def submit_command(
    connection: Connection, /, prompt: str | None, chat: bool, as_json: bool, **options: Any
) -> None:
    """Put PROMPT (or stdin, or '-') into the queue and print the request's id."""
    text = read_prompt(prompt)
    with connection.client() as client:
        if chat:
            handle = client.submit([{"role": "user", "content": text}], **given(options))
        else:
            handle = client.submit(text, **given(options))
    click.echo(json.dumps({"id": handle.id, "is_new": handle.is_new}) if as_json else handle.id)


@click.command(
    "stream",
    short_help="Follow a request from its beginning.",
    epilog="""\b
Examples:
  tokenmill stream 01JD…
  tokenmill stream 01JD… --after 25    # only what came after event 25
\b
Ctrl-C leaves the request alone; `tokenmill cancel` ends it.""",
)
@click.argument("request_id", metavar="ID")
@click.option("--after", type=int, default=0, help="Number of the last event you have seen.")
@click.option("--events", is_flag=True, help="One event a line, as JSON, instead of the text.")
@connection_options()
@pass_connection
def stream_command(connection: Connection, /, request_id: str, after: int, events: bool) -> None:
    """Print a request's text, from its beginning and then as it comes."""
    with connection.client() as client, client.attach(request_id, after=after) as stream:
        if not events:
            print_stream(connection, stream)
            return
        for event in stream.events():
            click.echo(event.model_dump_json())


@click.command(
    "status",
    short_help="Show where a request stands.",
    epilog="\b\nExample:\n  tokenmill status 01JD… --json | jq -r .state",
)
@click.argument("request_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options()
@pass_connection
def status_command(connection: Connection, /, request_id: str, as_json: bool) -> None:
    """Show where a request stands."""
    with connection.client() as client:
        status = client.status(request_id)
    click.echo(status.model_dump_json() if as_json else _lines(status))


@click.command(
    "explain",
    short_help="Say why a request waits, and what happened to it.",
    epilog="""\b
Examples:
  tokenmill explain 01JD…
  tokenmill explain 01JD… --json | jq '.place, .estimate_s'""",
)
@click.argument("request_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options()
@pass_connection
def explain_command(connection: Connection, /, request_id: str, as_json: bool) -> None:
    """Say why a request has no answer yet, and what happened to it so far.

    The times are seconds since it was enqueued.
    """
    with connection.client() as client:
        explanation = client.explain(request_id)
    if as_json:
        click.echo(explanation.model_dump_json())
        return
    click.echo(explanation.summary)
    for entry in explanation.timeline:
        click.echo(f"  {entry}")


@click.command(
    "result",
    epilog="""\b
Examples:
  tokenmill result 01JD…
  tokenmill result 01JD… --timeout-s 0 --json""",
)
@click.argument("request_id", metavar="ID")
@click.option("--timeout-s", type=float, help="Wait at most so long; exit status 124 then.")
@click.option("--json", "as_json", is_flag=True, help="The completion as JSON.")
@connection_options()
@pass_connection
def result_command(
    connection: Connection, /, request_id: str, timeout_s: float | None, as_json: bool
) -> None:
    """Wait for a request to end and print its text."""
    with connection.client() as client:
        completion: Completion = client.result(request_id, timeout_s=timeout_s)
    click.echo(completion.model_dump_json() if as_json else completion.text)


@click.command("cancel", epilog="\b\nExample:\n  tokenmill cancel 01JD… 01JE…")
@click.argument("request_ids", metavar="ID...", nargs=-1, required=True)
@connection_options()
@pass_connection
def cancel_command(connection: Connection, /, request_ids: tuple[str, ...]) -> None:
    """End requests now, wherever they are."""
    with connection.client() as client:
        for request_id in request_ids:
            cancelled = client.cancel(request_id)
            click.echo(f"{request_id} {'cancelled' if cancelled else 'had ended before'}")


def _lines(status: Status) -> str:
    facts = status.model_dump(exclude_none=True, exclude={"usage"})
    if status.usage is not None:
        facts |= status.usage.model_dump()
    width = max(map(len, facts)) + 2
    return "\n".join(f"{name.replace('_', ' '):{width}}{value}" for name, value in facts.items())
