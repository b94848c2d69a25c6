"""What happened to a request so far: its history in Redis, as entries and in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from .errors import ProtocolError
from .keys import PRIORITIES

_CLASS_NAMES: Final = {ready_class: name for name, ready_class in PRIORITIES.items()}
_REASONS: Final = {
    "worker_lost": "its worker was lost",
    "never_leased": "the worker that had read it did not take it",
    "entry_lost": "its place in the queue was lost",
    "drain": "its worker ended",
    "no_room": "another worker has room",
}
#: How a worker's facts are told: the singular, and the plural if it is another.
_COUNTS: Final = {
    "prompt_tokens": ("prompt token", "prompt tokens"),
    "cached_tokens": ("of them cached", "of them cached"),
    "prefill_chunks": ("prefill chunk", "prefill chunks"),
    "tokens": ("token", "tokens"),
    "preemptions": ("preemption", "preemptions"),
}
_TIMES: Final = {"prefill_ms": "prefill took", "first_token_ms": "first token after"}


class TimelineEntry(BaseModel):
    """One thing that happened to a request.

    `after_s` counts from the first entry. `event` and `facts` are as in docs/protocol.md, with the
    facts that a worker told beside the others; `text` says the same in words.
    """

    model_config = ConfigDict(frozen=True)

    at: datetime
    after_s: float
    event: str
    facts: dict[str, int | float | str]
    text: str

    def __str__(self) -> str:
        return f"{self.after_s:+.3f} s  {self.text}"


def read_timeline(lines: Sequence[str]) -> list[TimelineEntry]:
    """From the JSON lines of a history, oldest first.

    Raises:
        ProtocolError: a line does not follow the protocol.
    """
    entries: list[TimelineEntry] = []
    try:
        events = [json.loads(line) for line in lines]
        for fields in events:
            entries.append(_entry(fields, began_ms=events[0]["t"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError("a request's history does not follow the protocol") from error
    return entries


def _entry(fields: dict[str, Any], began_ms: int) -> TimelineEntry:
    told = fields.get("facts", {})
    facts = {name: value for name, value in fields.items() if name not in ("t", "ev", "facts")}
    words = _WORDS.get(fields["ev"], _in_general)
    text = words(fields, began_ms)
    return TimelineEntry(
        at=datetime.fromtimestamp(fields["t"] / 1000, tz=UTC),
        after_s=(fields["t"] - began_ms) / 1000,
        event=fields["ev"],
        facts={**facts, **told},
        text="; ".join([text, *_told(told)]),
    )


def _told(facts: dict[str, Any]) -> list[str]:
    """What a worker says of its attempt, without what did not happen."""
    parts = [
        f"{facts[name]:g} {words[facts[name] != 1]}"
        for name, words in _COUNTS.items()
        if facts.get(name)
    ]
    parts += [
        f"{words} {facts[name] / 1000:.3f} s" for name, words in _TIMES.items() if name in facts
    ]
    return [", ".join(parts)] if parts else []


# ---- one function for each kind of entry ----


def _enqueued(fields: dict[str, Any], began_ms: int) -> str:
    how = "read from a plain XADD" if fields["ev"] == "admitted" else "enqueued"
    priority = _CLASS_NAMES.get(fields["class"], fields["class"])
    return f"{how} with priority {priority}{_due(fields, began_ms, 'to start at')}"


def _held(fields: dict[str, Any], began_ms: int) -> str:
    return "waits: as many of its tenant's requests are ready as may be"


def _queued(fields: dict[str, Any], began_ms: int) -> str:
    return "ready, before all new work" if fields.get("q") == "r" else "ready"


def _moved(fields: dict[str, Any], began_ms: int) -> str:
    return f"an operator gave it priority {_CLASS_NAMES.get(fields['class'], fields['class'])}"


def _leased(fields: dict[str, Any], began_ms: int) -> str:
    log = f", {fields['e']} events in its log" if fields.get("e") else ""
    return f"attempt {fields['a']} begins on {fields['w']}{log}"


def _requeued(fields: dict[str, Any], began_ms: int) -> str:
    strikes = f", strike {fields['strikes']}" if fields.get("strikes") else ""
    return f"back in the queue: {_reason(fields)}{strikes}{_due(fields, began_ms)}"


def _handed_over(fields: dict[str, Any], began_ms: int) -> str:
    return f"handed over: {_reason(fields)}"


def _retried(fields: dict[str, Any], began_ms: int) -> str:
    return f"its worker failed, retry {fields['retries']}{_due(fields, began_ms)}"


def _ended(fields: dict[str, Any], began_ms: int) -> str:
    code = f" ({fields['code']})" if fields.get("code") else ""
    return f"ended: {fields['st']}{code}"


def _in_general(fields: dict[str, Any], began_ms: int) -> str:
    """Of a kind that this version does not know."""
    return str(fields["ev"])


def _reason(fields: dict[str, Any]) -> str:
    return _REASONS.get(fields["why"], str(fields["why"]))


def _due(fields: dict[str, Any], began_ms: int, words: str = "again at") -> str:
    return f", {words} {(fields['due'] - began_ms) / 1000:+.3f} s" if fields.get("due") else ""


_WORDS: Final[dict[str, Callable[[dict[str, Any], int], str]]] = {
    "enqueued": _enqueued,
    "admitted": _enqueued,
    "held": _held,
    "queued": _queued,
    "moved": _moved,
    "leased": _leased,
    "requeued": _requeued,
    "handed_over": _handed_over,
    "retried": _retried,
    "ended": _ended,
}
