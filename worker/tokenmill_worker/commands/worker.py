"""`tokenmill worker`: one flag for each option in `Settings`."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from tokenmill._url import has_password
from tokenmill_worker.errors import SettingsError, StartupError
from tokenmill_worker.main import leave, report, run_worker
from tokenmill_worker.model_engine import model_engine_factory
from tokenmill_worker.origins import as_config_file, origins
from tokenmill_worker.settings import ENV_PREFIX, Settings, load_settings


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for name, field in reversed(Settings.model_fields.items()):
        command = _option(name, field)(command)
    return command


def _option(name: str, field: FieldInfo) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A flag without a default of its own, so that environment and file can speak."""
    flag = f"--{name.replace('_', '-')}"
    kind = _click_type(field.annotation)
    return click.option(
        f"{flag}/--no-{flag[2:]}" if kind is click.BOOL else flag,
        name,
        type=kind,
        default=None,
        metavar=None if isinstance(kind, click.Choice) or kind is click.BOOL else "VALUE",
        help=f"{field.description} [default: {_shown_default(field)}]",
    )


def _click_type(annotation: Any) -> click.ParamType[Any] | Any:
    """Only what changes the form of the flag: values are checked by `Settings`."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    return click.BOOL if annotation is bool else click.STRING


def _shown_default(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, SecretStr):
        return default.get_secret_value()
    if isinstance(default, bool):
        return "on" if default else "off"
    return "unset" if default is None else str(default)


def _refuse_password(url: str | None) -> None:
    """Everybody on this machine can read the arguments of a process."""
    if url and has_password(url):
        raise SettingsError(
            "redis_url: no password on the command line, where other users can read it; put the "
            "URL into TOKENMILL_REDIS_URL, or the password into a --redis-password-file"
        )


class _OneLineErrors(click.Command):
    """Reports a wrong flag like any other wrong option: one line, and the same exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            report(f"{error.format_message()} See --help for the options.")
            ctx.exit(StartupError.exit_code)


@click.command(cls=_OneLineErrors, context_settings={"max_content_width": 100})
@click.option(
    "--config", type=click.Path(path_type=Path), help="TOML, YAML or JSON file of options."
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print every option, its value and where it comes from, as a --config file, and end.",
)
@_options
def worker(print_config: bool, **flags: Any) -> None:
    """Serve a model: take requests from the queue and stream their tokens back.

    Every option is also an environment variable TOKENMILL_<OPTION> and a key of the --config file;
    a flag wins over the environment, which wins over the file.
    """
    try:
        _refuse_password(flags["redis_url"])
        given = {name: value for name, value in flags.items() if value is not None}
        settings = load_settings(given)
        if print_config:
            click.echo(as_config_file(settings, origins(settings, given)), nl=False)
            return
    except StartupError as error:
        report(str(error))
        leave(error.exit_code)
    leave(run_worker(settings, model_engine_factory(settings)))


worker.epilog = f"Example: {ENV_PREFIX}REDIS_URL=redis://redis:6379/0 tokenmill worker"
