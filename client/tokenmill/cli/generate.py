"""`tokenmill generate` and `tokenmill chat`: send, stream the answer, done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

from tokenmill._requests import Prompt
from tokenmill.errors import UnknownRequest

from .connection import Connection, connection_options, pass_connection
from .options import given, read_prompt, request_options, sampling_options
from .printing import print_stream

AnyCallback = TypeVar("AnyCallback", bound=Callable[..., Any])


def _output_options(command: AnyCallback) -> AnyCallback:
    command = click.option("-v", "--verbose", is_flag=True, help="Usage and times on stderr.")(
        command
    )
    return click.option("--json", "as_json", is_flag=True, help="The completion as JSON.")(command)


def _send(
    connection: Connection, prompt: Prompt, *, as_json: bool, verbose: bool, options: dict[str, Any]
) -> str:
    """Stream one request to stdout and return its text. Ctrl-C cancels it."""
    with connection.client() as client:
        stream = client.stream(prompt, **given(options))
        try:
            with stream:
                return print_stream(connection, stream, as_json=as_json, verbose=verbose).text
        except KeyboardInterrupt:
            # Leaving the block would do, but not where --request-id made it somebody's request, or
            # where the call that enqueues was interrupted and nobody knows whether it is ours.
            with suppress(UnknownRequest):
                stream.cancel()
            raise


@click.command(
    "generate",
    short_help="Continue a prompt and print the text as it comes.",
    epilog="""\b
Examples:
  tokenmill generate "Once upon a time" --max-tokens 40
  tokenmill generate --temperature 0 --stop "\\n\\n" < prompt.txt
  tokenmill generate "1, 2, 3," --json | jq .token_ids
\b
Ctrl-C cancels the request. All sampling options have vLLM's names and meanings.""",
)
@click.argument("prompt", required=False)
@sampling_options
@request_options
@_output_options
@connection_options()
@pass_connection
def generate_command(
    connection: Connection, /, prompt: str | None, as_json: bool, verbose: bool, **options: Any
) -> None:
    """Continue PROMPT (or stdin, or '-') and print the text as it comes."""
    text = read_prompt(prompt)
    _send(connection, text, as_json=as_json, verbose=verbose, options=options)


@click.command(
    "chat",
    short_help="Answer a message, or hold a conversation.",
    epilog="""\b
Examples:
  tokenmill chat "Name the capital of France."
  tokenmill chat --system "Answer in one word." "Name the capital of France."
  tokenmill chat                   # a conversation; Ctrl-D ends it
\b
Ctrl-C cancels the request.""",
)
@click.argument("message", required=False)
@click.option("--system", help="System message.")
@sampling_options
@request_options
@_output_options
@connection_options()
@pass_connection
def chat_command(
    connection: Connection,
    /,
    message: str | None,
    system: str | None,
    as_json: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Answer MESSAGE (or stdin, or '-') through the model's chat template.

    Without a message in a terminal, it is a conversation.
    """
    messages: list[dict[str, str]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    if message is not None or not sys.stdin.isatty():
        messages.append({"role": "user", "content": read_prompt(message, what="MESSAGE")})
        _send(connection, messages, as_json=as_json, verbose=verbose, options=options)
        return
    if options.pop("request_id") is not None:
        raise click.UsageError("--request-id names one request; a conversation has many.")
    while (line := _next_line()) is not None:
        messages.append({"role": "user", "content": line})
        answer = _send(connection, messages, as_json=as_json, verbose=verbose, options=options)
        messages.append({"role": "assistant", "content": answer})


def _next_line() -> str | None:
    """What the person types next; None at Ctrl-D."""
    while True:
        click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            click.echo(err=True)
            return None
        if line.strip():
            return line.strip()
