"""Options of the commands that make a request: sampling parameters and how it is queued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

import click

from tokenmill.keys import PRIORITIES

AnyCallback = TypeVar("AnyCallback", bound=Callable[..., Any])

#: Name of the sampling parameter, click's type, help. vLLM's names; a flag where the type is bool.
SAMPLING: Final[tuple[tuple[str, Any, str], ...]] = (
    ("max_tokens", int, "Most tokens to generate.  [default: 256]"),
    ("min_tokens", int, "Do not stop before so many tokens."),
    ("temperature", float, "0 takes the likeliest token; the model's own setting if left out."),
    ("top_p", float, "Sample among the likeliest tokens with this total probability."),
    ("top_k", int, "Sample among so many likeliest tokens; 0: all."),
    ("min_p", float, "Leave out tokens below this share of the likeliest one's probability."),
    ("seed", int, "The same seed gives the same tokens, whatever else is in the batch."),
    ("presence_penalty", float, "Against tokens that occurred, once."),
    ("frequency_penalty", float, "Against tokens that occurred, each time."),
    ("repetition_penalty", float, "Divides the logits of tokens that occurred, prompt included."),
    ("logprobs", int, "Log-probabilities of so many alternatives; see --json."),
    ("ignore_eos", bool, "Go on after the end-of-sequence token."),
    ("include_stop_str_in_output", bool, "Keep the stop text at the end."),
    ("skip_special_tokens", bool, "Leave special tokens out of the text.  [default: skip]"),
)
#: The same for those that may be given several times.
REPEATABLE: Final[tuple[tuple[str, Any, str], ...]] = (
    ("stop", str, "Stop before this text."),
    ("stop_token_ids", int, "Stop after this token."),
    ("bad_words", str, "Never generate this."),
    ("allowed_token_ids", int, "Generate only tokens that were named so."),
)


class Moment(click.ParamType[datetime | timedelta]):
    """`+SECONDS` from now, or a date and time with its zone."""

    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime | timedelta:
        try:
            if str(value).startswith("+"):
                return timedelta(seconds=float(value))
            moment = datetime.fromisoformat(str(value))
        except (ValueError, OverflowError):
            self.fail("use +SECONDS, or ISO 8601 as in 2030-01-31T08:00Z", param, ctx)
        if moment.tzinfo is None:
            self.fail("has no time zone; append Z for UTC, or an offset as in +02:00", param, ctx)
        return moment


#: How the request is queued and who may serve it.
REQUEST: Final[tuple[tuple[str, Any, str], ...]] = (
    ("--model", str, "Refuse to be served by a worker of another model."),
    ("--request-id", str, "Your own id: a repeated call is the same request."),
    ("--priority", click.Choice(list(PRIORITIES)), "Class of service."),
    ("--tenant", str, "On whose behalf: tenants share the queue fairly."),
    ("--deadline-s", float, "Give up after so many seconds."),
    ("--queue-deadline-s", float, "Give up if no worker has taken it by then."),
    ("--first-token-deadline-s", float, "Give up if there is no token by then."),
    ("--not-before", Moment(), "Serve it then or later: 2030-01-31T08:00Z, or +90 for seconds."),
)


class LogitBias(click.ParamType[tuple[int, float]]):
    """`ID=BIAS`."""

    name = "id=bias"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail("use TOKEN_ID=BIAS, as in 42=-100", param, ctx)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def sampling_options(command: AnyCallback) -> AnyCallback:
    """All sampling parameters; those that were not given arrive as None or ()."""
    command = click.option(
        "--logit-bias", type=LogitBias(), multiple=True, help="Add to a token's logit. Repeatable."
    )(command)
    for name, kind, text in reversed(REPEATABLE):
        command = click.option(
            _flag(name), name, type=kind, multiple=True, help=f"{text} Repeatable."
        )(command)
    for name, kind, text in reversed(SAMPLING):
        flag = _flag(name)
        spelled = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        command = click.option(spelled, name, type=kind, default=None, help=text)(command)
    return command


def request_options(command: AnyCallback) -> AnyCallback:
    """The options of `REQUEST`; those that were not given arrive as None."""
    for flag, kind, text in reversed(REQUEST):
        command = click.option(flag, type=kind, help=text)(command)
    return command


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were set, ready for the SDK, which knows the defaults."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name == "logit_bias":
            if value:
                values[name] = dict(value)
        elif isinstance(value, tuple):
            if value:
                values[name] = list(value)
        elif value is not None:
            values[name] = value
    return values


def read_prompt(argument: str | None, *, what: str = "PROMPT") -> str:
    """The prompt from the command line, or from stdin where it is `-` or a pipe."""
    if argument not in {None, "-"}:
        return str(argument)
    if argument is None and sys.stdin.isatty():
        raise click.UsageError(
            f"Missing argument '{what}': give it here, as '-', or through a pipe."
        )
    text: str = sys.stdin.read().removesuffix("\n")  # as `$(…)` does
    if not text:
        raise click.UsageError(f"stdin brought no {what.lower()}.")
    return text
