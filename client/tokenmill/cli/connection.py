"""Which queue a command works on: `--redis-url`, `--insecure-redis`, `--namespace`, `--pool`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click

from tokenmill import Client
from tokenmill._url import has_password
from tokenmill.keys import Keyspace

AnyCallback = TypeVar("AnyCallback", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Connection:
    """What was said on the command line or in the environment; None: the SDK's default."""

    redis_url: str | None = None
    namespace: str = "tokenmill"
    pool: str = "default"
    insecure_redis: bool = False

    @property
    def keys(self) -> Keyspace:
        return Keyspace(self.namespace, self.pool)

    def client(self) -> Client:
        return Client(
            self.redis_url,
            namespace=self.namespace,
            pool=self.pool,
            insecure=self.insecure_redis,
        )


def _remember(context: click.Context, parameter: click.Parameter, value: str | bool | None) -> None:
    name = str(parameter.name)
    if name == "redis_url" and value and _is_on_command_line(context, name):
        refuse_password(str(value))
    if value is not None:
        known = context.obj or Connection()
        context.obj = replace(known, **{name: value})


def _is_on_command_line(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse_password(url: str) -> None:
    """Raises a usage error: everybody on this machine can read the arguments of a process."""
    if has_password(url):
        raise click.UsageError(
            "--redis-url: no password on the command line, where other users can read it; put the "
            "URL into TOKENMILL_REDIS_URL, or the password into a file named by "
            "TOKENMILL_REDIS_PASSWORD_FILE."
        )


def connection_options(*, environment: bool = False) -> Callable[[AnyCallback], AnyCallback]:
    """The options, which end up in `context.obj`.

    They are taken before and after the command's name; the later one wins. Only the group reads
    the environment, so that a variable does not win over an option before the name.
    """

    def decorate(command: AnyCallback) -> AnyCallback:
        command = click.option(
            "--insecure-redis",
            is_flag=True,
            default=None,
            help="Talk to a public host without verified TLS.",
            envvar="TOKENMILL_INSECURE_REDIS" if environment else None,
            show_envvar=True,
            expose_value=False,
            callback=_remember,
        )(command)
        for flag, metavar, text in (
            ("--pool", "NAME", "Pool of workers.  [default: default]"),
            ("--namespace", "NAME", "First part of every key.  [default: tokenmill]"),
            ("--redis-url", "URL", "Redis.  [default: redis://localhost:6379/0]"),
        ):
            variable = f"TOKENMILL_{flag[2:].replace('-', '_').upper()}"
            command = click.option(
                flag,
                metavar=metavar,
                help=text,
                envvar=variable if environment else None,
                show_envvar=True,
                expose_value=False,
                callback=_remember,
            )(command)
        return command

    return decorate


pass_connection = click.make_pass_decorator(Connection, ensure=True)
