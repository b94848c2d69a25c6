"""Reading `--config FILE`: TOML, YAML or JSON, told apart by the file's suffix."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from .errors import SettingsError

_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.loads,
}


def read_config_file(path: Path) -> dict[str, Any]:
    """The file's keys, `lease-ms` and `lease_ms` alike, and their values.

    Raises:
        SettingsError: unreadable, of another type, malformed, or no table of options.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise SettingsError(f"config: {path.name} must end in {', '.join(_PARSERS)}")
    try:
        values = parse(path.read_text())
    except OSError as error:
        raise SettingsError(f"config: cannot read {path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError):
        raise SettingsError(f"config: {path} is no valid {path.suffix[1:].upper()}") from None
    if values is None:  # an empty YAML file
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"config: {path} must hold option names and values")
    return {str(name).replace("-", "_"): value for name, value in values.items()}
