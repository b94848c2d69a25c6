"""From what pydantic found to our errors: the field and the limit, never the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from . import limits
from .errors import InvalidRequest, UnsupportedParameter

_LIMITS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entry(ies)",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_unicode": "must be valid Unicode text",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "missing": "is missing",
}
#: Names of the wire's own nested fields; anything else inside a location is the caller's text.
_NESTED = frozenset({"role", "content", "name", "type", "text"})


def explain(error: ValidationError) -> InvalidRequest:
    """The first finding as our error."""
    found = error.errors(include_url=False, include_input=False)[0]
    kind, context = found["type"], found.get("ctx", {})
    if kind == "value_error":  # raised by our own validators, whose texts hold no value
        text = str(context["error"])
        return InvalidRequest(text.split(" ", 1)[0] if _names_a_field(text) else "prompt", text)
    field = _field(found)
    if kind == "extra_forbidden":
        supported = ", ".join(sorted(_NESTED))
        return UnsupportedParameter(field, f"has an unsupported field; supported: {supported}")
    if kind == "literal_error" and field == "n":
        return UnsupportedParameter(field, "only 1 is supported; send one request per choice")
    text = _LIMITS.get(kind, "is not valid").format(**context)
    return InvalidRequest(field, text)


def _names_a_field(text: str) -> bool:
    return "_" in text.split(" ", 1)[0]


def _field(found: ErrorDetails) -> str:
    first, *rest = found["loc"]
    parts = [part for part in rest if isinstance(part, int) or part in _NESTED]
    if first == "logit_bias":  # its keys are the caller's
        parts = []
    return ".".join(str(part) for part in (first, *parts))


def check_json(field: str, value: Any, depth: int = 1) -> None:
    """Raises `InvalidRequest` unless `value` survives a trip through JSON unchanged."""
    if depth > limits.MAX_JSON_DEPTH:
        raise InvalidRequest(field, f"must be nested at most {limits.MAX_JSON_DEPTH} deep")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidRequest(field, "must have text keys only")
            check_text(field, key)
            check_json(field, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_json(field, item, depth + 1)
    elif isinstance(value, str):
        check_text(field, value)
    else:
        _check_scalar(field, value)


def _check_scalar(field: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(field, "must hold finite numbers only")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidRequest(field, "must hold whole numbers of at most 64 bits")
    if value is not None and not isinstance(value, bool | int | float):
        raise InvalidRequest(field, "must hold JSON only: objects, lists, text, numbers, null")


def check_text(field: str, value: str) -> None:
    """Raises `InvalidRequest` if `value` cannot be encoded (it holds half a surrogate pair)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "must be valid Unicode text") from None


def check_number(field: str, value: object, *, low: float, high: float) -> float:
    """`value` as a float if it is a finite number above `low` and at most `high`."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low < value <= high:  # type: ignore[operator]  # ok says it is a number
        raise InvalidRequest(field, f"must be a number above {low:g} and at most {high:g}")
    return float(value)  # type: ignore[arg-type]
