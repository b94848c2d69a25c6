"""Text to stdout as it comes, everything else to stderr."""

from __future__ import annotations

import time

import click

from tokenmill import TokenStream
from tokenmill.protocol import Completion

from .connection import Connection
from .waiting import WaitingNotice


def print_stream(
    connection: Connection, stream: TokenStream, *, as_json: bool = False, verbose: bool = False
) -> Completion:
    """Follow a stream to its end and show it; with `as_json`, only the completion at the end.

    Raises:
        RequestFailed: it ended otherwise than done; the text until then is shown.
    """
    started_s = time.monotonic()
    first_s: float | None = None
    last = ""
    try:
        with WaitingNotice(connection) as notice:
            for text in stream:
                notice.stop()
                first_s = first_s or time.monotonic()
                last = text or last
                if not as_json:
                    click.echo(text, nl=False)
    finally:
        if last and not last.endswith("\n") and not as_json:
            click.echo()
    completion = stream.completion()
    if as_json:
        click.echo(completion.model_dump_json())
    if verbose:
        now_s = time.monotonic()
        print_usage(completion, first_s=(first_s or now_s) - started_s, total_s=now_s - started_s)
    return completion


def print_usage(completion: Completion, *, first_s: float, total_s: float) -> None:
    """One line on stderr: tokens, how it ended, how fast it was."""
    usage = completion.usage
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    click.echo(
        f"id {completion.id} · prompt {usage.prompt_tokens} tokens{cached} · "
        f"generated {usage.completion_tokens} · finish {completion.finish_reason} · "
        f"first token {first_s:.2f} s · total {total_s:.2f} s",
        err=True,
    )
