"""The command group `tokenmill`: its own commands and those that other packages plug in."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import click

from tokenmill import __version__
from tokenmill._tracing_setup import set_up_tracing

from .connection import Connection, connection_options
from .failures import fail, failures_in_one_line

ENTRY_POINT_GROUP: Final = "tokenmill.commands"
#: Command → module beside this one that defines it under the same name. Loaded when used.
COMMANDS: Final = {
    "generate": "generate",
    "chat": "generate",
    "submit": "requests",
    "stream": "requests",
    "status": "requests",
    "explain": "requests",
    "result": "requests",
    "cancel": "requests",
    "queue": "queue",
    "top": "top",
    "doctor": "doctor.command",
    "tenant": "tenant",
    "dlq": "dlq",
}


class CommandGroup(click.Group):
    """Finds commands by name, here or among the entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(_plugged_in())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module = import_module(f"{__package__}.{COMMANDS[cmd_name]}")
            return _as_command(getattr(module, f"{cmd_name}_command"))
        plugged_in = _plugged_in().get(cmd_name)
        return _load(plugged_in) if plugged_in else None

    def invoke(self, ctx: click.Context) -> Any:
        with failures_in_one_line():
            return super().invoke(ctx)


def _plugged_in() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _as_command(loaded: object) -> click.Command:
    if not isinstance(loaded, click.Command):
        raise TypeError(f"{loaded!r} is no click command")
    return loaded


def _load(point: EntryPoint) -> click.Command:
    try:
        return _as_command(point.load())
    except ModuleNotFoundError as error:
        return _unavailable(point.name, error.name or "a package")


def _unavailable(name: str, missing: str) -> click.Command:
    """Stands for a command whose packages are not installed, and says so when it is run."""
    way_out = "pip install 'tokenmill[worker,embedded]'"

    @click.command(
        name,
        short_help=f"(not installed: {way_out})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
    def unavailable() -> None:
        fail(f"`tokenmill {name}` needs {missing}: {way_out}")

    return unavailable


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  tokenmill demo
  tokenmill worker --model Qwen/Qwen3-0.6B
  tokenmill generate "Once upon a time" --max-tokens 40
  echo "Summarise: …" | tokenmill chat --temperature 0
  tokenmill submit "Once upon a time" --priority low
\b
Exit status:
  0 done · 1 the request failed · 2 wrong usage or refused · 69 no Redis
  75 the queue is full · 124 not ended in time · 130 interrupted""",
)
@connection_options(environment=True)
@click.version_option(__version__, prog_name="tokenmill")
@click.pass_context
def tokenmill(context: click.Context) -> None:
    """Message-queue driven workers for language models."""
    # What the SDK logs is for programs; a person gets the error it leads to, in one line.
    logging.getLogger("tokenmill").addHandler(logging.NullHandler())
    context.obj = context.obj or Connection()
    context.default_map = {name: _explicit(context) for name in _plugged_in()}
    if context.invoked_subcommand in COMMANDS:  # the others see to it themselves
        context.call_on_close(set_up_tracing("tokenmill-cli"))


def _explicit(context: click.Context) -> dict[str, Any]:
    """Connection options given before the name of a plugged-in command, which has its own."""
    given = {}
    for name in ("redis_url", "insecure_redis", "namespace", "pool"):
        source = context.get_parameter_source(name)
        if source is click.core.ParameterSource.COMMANDLINE:
            given[name] = getattr(context.obj, name)
    return given
