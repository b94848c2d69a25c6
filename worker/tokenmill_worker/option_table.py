"""The table of all options in docs/configuration.md; run as a module, it is made anew there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from .settings import ENV_PREFIX, Settings

BEGIN: Final = (
    "<!-- options: made by `python -m tokenmill_worker.option_table docs/configuration.md` -->"
)
END: Final = "<!-- end of options -->"
#: Defaults that depend on the machine.
SHOWN: Final = {"name": "the host's name"}


def option_table() -> str:
    """Markdown: flag, variable, default and what it is for; a file's key is the flag's name."""
    return "\n".join([
        "| flag | environment | default | |",
        "| --- | --- | --- | --- |",
        *(_row(name, field) for name, field in Settings.model_fields.items()),
    ])  # fmt: skip


def with_table(page: str) -> str:
    """The page with its table made anew.

    Raises:
        ValueError: the page lacks one of the two marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{option_table()}\n{END}{after}"


def _row(name: str, field: FieldInfo) -> str:
    flag = f"--{name.replace('_', '-')}"
    text = " ".join([str(field.description), *_values(field)])
    return f"| `{flag}` | `{ENV_PREFIX}{name.upper()}` | {_default(name, field)} | {text} |"


def _default(name: str, field: FieldInfo) -> str:
    default = field.default
    if name in SHOWN:
        return SHOWN[name]
    if isinstance(default, SecretStr):
        return f"`{default.get_secret_value()}`"
    if isinstance(default, bool):
        return "on" if default else "off"
    return "unset" if default is None else f"`{default}`"


def _values(field: FieldInfo) -> Iterator[str]:
    """What it may be, where that is a list or a range."""
    if get_origin(field.annotation) is Literal:
        yield f"One of {', '.join(f'`{value}`' for value in get_args(field.annotation))}."
    limits = {kind: getattr(rule, kind) for rule in field.metadata for kind in _kinds(rule)}
    low, high = limits.get("ge", limits.get("gt")), limits.get("le")
    if low is not None and high is not None:
        yield f"{'Above ' if 'gt' in limits else ''}{_number(low)} to {_number(high)}."
    elif low:
        yield f"{'Above' if 'gt' in limits else 'At least'} {_number(low)}."


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def _kinds(rule: object) -> list[str]:
    return [kind for kind in ("ge", "gt", "le") if hasattr(rule, kind)]


def main(arguments: list[str]) -> int:
    """Rewrites the table in the file named by the argument."""
    page = Path(arguments[0])
    page.write_text(with_table(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
