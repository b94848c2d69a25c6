"""The command line without a queue: help, options, exit statuses, plugged-in commands."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tokenmill import SamplingParams, __version__
from tokenmill._requests import RequestOptions
from tokenmill.cli import app
from tokenmill.cli.app import COMMANDS, tokenmill
from tokenmill.cli.options import given, request_options, sampling_options

COMMANDS_OF_THE_CLIENT = [
    "generate", "chat", "submit", "stream", "status", "explain", "result", "cancel", "queue",
    "top", "doctor", "tenant", "dlq",
]  # fmt: skip


def run(*arguments: str, **options: object):
    return CliRunner().invoke(tokenmill, list(arguments), **options)


def test_help_lists_every_command_and_examples() -> None:
    done = run("--help")

    assert done.exit_code == 0
    for name in [*COMMANDS_OF_THE_CLIENT, "worker", "demo"]:
        assert f"\n  {name} " in done.output
    assert "tokenmill generate" in done.output


@pytest.mark.parametrize("name", COMMANDS_OF_THE_CLIENT)
def test_each_command_has_help_with_an_example(name: str) -> None:
    done = run(name, "--help")

    assert done.exit_code == 0
    assert f"tokenmill {name}" in done.output.partition("Example")[2]
    assert "--redis-url" in done.output


def test_version() -> None:
    assert run("--version").output == f"tokenmill, version {__version__}\n"


def test_every_sampling_parameter_has_its_option() -> None:
    @click.command()
    @sampling_options
    def command(**_options: object) -> None: ...

    names = {parameter.name for parameter in command.params}
    flags = {flag for parameter in command.params for flag in parameter.opts}
    fields = set(SamplingParams.model_fields) - {"n"}  # one choice per request
    assert names == fields
    assert flags == {f"--{name.replace('_', '-')}" for name in fields}


def test_only_what_was_given_is_passed_on() -> None:
    seen: dict[str, object] = {}

    @click.command()
    @sampling_options
    def command(**options: object) -> None:
        seen.update(given(options))

    arguments = [
        "--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b",
        "--logit-bias", "7=-100", "--stop-token-ids", "2", "--no-skip-special-tokens",
        "--ignore-eos",
    ]  # fmt: skip
    CliRunner().invoke(command, arguments, catch_exceptions=False)

    assert seen == {
        "max_tokens": 5,
        "temperature": 0.0,
        "stop": ["a", "b"],
        "logit_bias": {7: -100.0},
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "ignore_eos": True,
    }


def test_an_unknown_option_is_refused_by_name() -> None:
    done = run("generate", "hi", "--beam-width", "4")

    assert done.exit_code == 2
    assert "--beam-width" in done.stderr


def test_an_unknown_command_is_refused() -> None:
    done = run("generat")

    assert done.exit_code == 2
    assert "generat" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--priority", "urgent"], "--priority"),
        (["submit", "hi", "--request-id", "a b"], "request_id"),
        (["--namespace", "a:b", "generate", "hi"], "namespace"),
        (["--redis-url", "http://x", "generate", "hi"], "Redis URL"),
        (["--redis-url", "redis://8.8.8.8", "status", "x"], "--insecure-redis"),
        (["--redis-url", "redis://:canary@h", "status", "x"], "no password on the command line"),
        (["status", "--redis-url", "redis://:canary@h", "x"], "no password on the command line"),
        (["--redis-url", "redis://:canary@h", "worker"], "no password on the command line"),
        (["generate", "hi", "--logit-bias", "5"], "TOKEN_ID=BIAS"),
        (["cancel"], "ID"),
    ],
)
def test_wrong_usage_names_what_is_wrong(arguments: list[str], field: str) -> None:
    done = run(*arguments)

    assert done.exit_code == 2
    assert field in done.stderr
    assert "Traceback" not in done.output
    assert "canary" not in done.output


@pytest.mark.parametrize("where", ["flag", "environment"])
def test_a_public_host_without_tls_has_to_be_wanted(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Here 127.0.0.1 plays the public host, so that the test leaves this machine alone."""
    monkeypatch.setattr("tokenmill._url.is_private", lambda host: False)
    flags = ["--insecure-redis"] if where == "flag" else []
    if where == "environment":
        monkeypatch.setenv("TOKENMILL_INSECURE_REDIS", "1")
    done = run("--redis-url", "redis://127.0.0.1:1", *flags, "queue")

    assert done.exit_code == os.EX_UNAVAILABLE
    assert "cannot be reached" in done.stderr


def test_an_empty_stdin_is_no_prompt() -> None:
    done = run("generate", input="")

    assert done.exit_code == 2
    assert "stdin brought no prompt" in done.stderr


def test_no_redis_is_one_line_and_status_69(tmp_path: Path) -> None:
    done = run("--redis-url", f"unix://{tmp_path}/none.sock", "status", "x")

    assert done.exit_code == os.EX_UNAVAILABLE
    assert done.stderr.startswith("Error: Redis at ")
    assert done.stderr.count("\n") == 1


def test_a_plugged_in_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("extra", "support_plugin:command", app.ENTRY_POINT_GROUP)
    monkeypatch.setattr(app, "entry_points", lambda group: [point])

    done = run("--pool", "mine", "extra")

    assert (done.exit_code, done.output) == (0, "pool mine\n"), "options before it reach it"


def test_a_plugged_in_command_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("extra", "no_such_package:command", app.ENTRY_POINT_GROUP)
    monkeypatch.setattr(app, "entry_points", lambda group: [point])

    done = run("extra", "--whatever", "1")

    assert done.exit_code == 1
    assert done.stderr == (
        "Error: `tokenmill extra` needs no_such_package: pip install 'tokenmill[worker,embedded]'\n"
    )
    assert "extra" in run("--help").output


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import tokenmill.__main__ as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "queue"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "tokenmill: the command line needs: pip install 'tokenmill[cli]'\n"


def test_commands_are_listed_once() -> None:
    assert list(COMMANDS) == COMMANDS_OF_THE_CLIENT


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("+90", timedelta(seconds=90)),
        ("+0.5", timedelta(seconds=0.5)),
        ("2030-01-31T08:00Z", datetime(2030, 1, 31, 8, tzinfo=UTC)),
        ("2030-01-31T08:00:30+02:00", datetime(2030, 1, 31, 6, 0, 30, tzinfo=UTC)),
    ],
)
def test_a_request_may_be_for_later(text: str, moment: object) -> None:
    seen: dict[str, object] = {}

    @click.command()
    @request_options
    def command(**options: object) -> None:
        seen.update(given(options))

    CliRunner().invoke(command, ["--not-before", text], catch_exceptions=False)

    assert seen == {"not_before": moment}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("tomorrow", "ISO 8601"),
        ("+x", "ISO 8601"),
        ("2030-01-31T08:00", "time zone"),
        ("+1e99", "ISO"),
    ],
)
def test_an_unclear_moment_is_refused(text: str, hint: str) -> None:
    done = run("submit", "hello", "--not-before", text)

    assert done.exit_code == 2
    assert hint in done.output


def test_every_request_option_has_its_flag() -> None:
    @click.command()
    @request_options
    def command(**_options: object) -> None: ...

    names = {parameter.name for parameter in command.params}
    assert names == set(RequestOptions.__annotations__) | {"model"}
