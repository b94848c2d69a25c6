"""What earlier attempts published, so that the next token continues exactly there."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import ValidationError

from tokenmill.protocol import TokenEvent
from tokenmill_engine.errors import ResumeMismatch

from .conversion import Published


def fold_log(events: Sequence[str]) -> Published:
    """The tokens and the length of the text in a log, given as the JSON of its events.

    Raises:
        ResumeMismatch: the log is not what workers of this protocol write.
    """
    token_ids: list[int] = []
    num_chars = 0
    for seq, payload in enumerate(events, 1):
        event = _token_event(payload)
        if event is None:
            continue
        if event.seq != seq or event.index != len(token_ids):
            raise ResumeMismatch("the event log has a gap")
        token_ids += event.token_ids
        num_chars += len(event.text)
    return Published(tuple(token_ids), num_chars)


def _token_event(payload: str) -> TokenEvent | None:
    """The event if it carries tokens; events of other kinds, known or not, carry none."""
    try:
        data = json.loads(payload)
        if data.get("ev", "token") != "token":
            return None
        return TokenEvent.model_validate(data)
    except (ValueError, AttributeError, ValidationError):
        raise ResumeMismatch("the event log holds an entry that is no event") from None
