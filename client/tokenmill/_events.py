"""From the JSON of a log entry or a message to an event."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from .errors import ProtocolError
from .protocol import EndEvent, StartEvent, TokenEvent

#: What travels; a `RewindEvent` is made by the reader.
WireEvent = StartEvent | TokenEvent | EndEvent

_MODELS: dict[str, type[StartEvent] | type[TokenEvent] | type[EndEvent]] = {
    "start": StartEvent,
    "token": TokenEvent,
    "end": EndEvent,
}


def parse_event(payload: str | bytes) -> WireEvent | None:
    """The event, or None for a kind this version does not know.

    Raises `ProtocolError`, without quoting the payload, for anything that is not an event.
    """
    return parse_numbered(payload)[1]


def parse_numbered(payload: str | bytes) -> tuple[int, WireEvent | None]:
    """The event with its number, which an unknown kind has too."""
    try:
        fields: Any = json.loads(payload)
        model = _MODELS.get(fields.get("ev", "token"))
        if model is None:
            return int(fields["e"]), None
        event = model.model_validate(fields)
    except ValidationError as error:
        name = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ProtocolError(f"not an event: field {name!r} is missing or wrong") from None
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise ProtocolError("not an event: a JSON object with a number 'e' is expected") from None
    return event.seq, event
