"""How a command fails: one line on stderr and an exit status a script can act on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import click

from tokenmill.errors import (
    ConfigurationError,
    InvalidRequest,
    QueueFull,
    QueueUnavailable,
    RequestConflict,
    ResultTimeout,
    TokenmillError,
)

#: The first class that matches decides; everything else is 1.
EXIT_CODES: Final[tuple[tuple[type[TokenmillError], int], ...]] = (
    (InvalidRequest, 2),
    (ConfigurationError, 2),
    (RequestConflict, 2),
    (QueueUnavailable, os.EX_UNAVAILABLE),
    (QueueFull, os.EX_TEMPFAIL),
    (ResultTimeout, 124),  # as timeout(1)
)
INTERRUPTED: Final = 130  # as a shell reports SIGINT


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with one line."""
    click.echo(f"Error: {message}", err=True)
    raise click.exceptions.Exit(status)


@contextmanager
def failures_in_one_line() -> Iterator[None]:
    """Turns the SDK's exceptions, and Ctrl-C, into what the shell sees."""
    try:
        yield
    except TokenmillError as error:
        fail(str(error), next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1))
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
