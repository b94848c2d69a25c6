"""Where the value of each option comes from, and all of them as a config file without secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from tokenmill._url import redact_url

from .config_file import read_config_file
from .settings import ENV_PREFIX, Settings, config_path

#: Column at which the comments begin.
COMMENT_COLUMN = 52


def origins(settings: Settings, flags: Mapping[str, Any]) -> dict[str, str]:
    """Option → what set it; `settings` are `load_settings(flags)`."""
    path = config_path(flags)
    from_file = read_config_file(path) if path else {}
    found = {name: _origin(name, flags, from_file, path) for name in Settings.model_fields}
    if found["redis_url"] == "default" and "redis_url" in settings.model_fields_set:
        found["redis_url"] = "environment REDIS_URL"
    return found


def _origin(
    name: str, flags: Mapping[str, Any], from_file: Mapping[str, Any], path: Path | None
) -> str:
    variable = f"{ENV_PREFIX}{name.upper()}"
    if name in flags:
        return f"flag --{name.replace('_', '-')}"
    if any(found.upper() == variable and value for found, value in os.environ.items()):
        return f"environment {variable}"
    if name in from_file:
        return f"file {path}"
    return "default"


def as_config_file(settings: Settings, origin_of: Mapping[str, str]) -> str:
    """TOML that `--config` reads again; what is unset is a comment, a secret is `***`."""
    lines = ["# In effect for `tokenmill worker`: flag > environment > file > default."]
    for name in Settings.model_fields:
        value = getattr(settings, name)
        line = f"# {name} is unset" if value is None else f"{name} = {_as_toml(value)}"
        lines.append(f"{line:{COMMENT_COLUMN}}  # {origin_of[name]}")
    return "\n".join(lines) + "\n"


def _as_toml(value: object) -> str:
    if isinstance(value, SecretStr):
        value = redact_url(value.get_secret_value())
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value))  # TOML's basic strings have JSON's escapes
