"""When a request may be served, and by when it must be: `not_before` and the deadlines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypedDict

from . import limits
from ._validation import check_number
from .errors import InvalidRequest

#: After the deadline a worker has this long to say so, before the client stops waiting.
GRACE_S: Final = 10.0
#: Far enough in the future to tell seconds since the epoch from anything else.
_LATEST_S: Final = 1e11


class EnqueueTimes(TypedDict):
    """Keywords of `QueueCalls.enqueue`."""

    delay_ms: int
    deadline_ms: int
    queue_deadline_ms: int | None
    first_token_deadline_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds. `not_before_s` is a time since the epoch by this machine's clock; the deadlines
    count from then on, or from the enqueue: until the end, the first lease, the first token."""

    deadline_s: float
    queue_deadline_s: float | None = None
    first_token_deadline_s: float | None = None
    not_before_s: float | None = None

    def delay_s(self) -> float:
        """From now until the request may be served."""
        return 0.0 if self.not_before_s is None else max(0.0, self.not_before_s - time.time())

    def patience_s(self) -> float:
        """From now until somebody must have said how the request ended."""
        return self.delay_s() + self.deadline_s + GRACE_S

    def enqueue_options(self) -> EnqueueTimes:
        """At this moment."""
        return {
            "delay_ms": round(self.delay_s() * 1000),
            "deadline_ms": _ms(self.deadline_s),
            "queue_deadline_ms": _optional_ms(self.queue_deadline_s),
            "first_token_deadline_ms": _optional_ms(self.first_token_deadline_s),
        }


def check_timing(options: Mapping[str, Any]) -> Timing:
    """From the keywords of a request.

    Raises:
        InvalidRequest: names the keyword and its limit.
    """
    deadline_s = check_number(
        "deadline_s",
        options.get("deadline_s", limits.DEFAULT_DEADLINE_S),
        low=0,
        high=limits.MAX_DEADLINE_S,
    )
    parts = {
        name: check_number(name, options[name], low=0, high=deadline_s)
        for name in ("queue_deadline_s", "first_token_deadline_s")
        if name in options
    }
    not_before_s = _epoch_s(options["not_before"]) if "not_before" in options else None
    return Timing(deadline_s=deadline_s, not_before_s=not_before_s, **parts)


def _epoch_s(not_before: object) -> float:
    now_s = time.time()
    match not_before:
        case timedelta():
            at_s = now_s + not_before.total_seconds()
        case datetime(tzinfo=None):
            raise InvalidRequest("not_before", "must have a time zone, as datetime.now(UTC) has")
        case datetime():
            at_s = not_before.timestamp()
        case _:
            at_s = _check_epoch(not_before)
    if at_s > now_s + limits.MAX_DELAY_S:
        raise InvalidRequest("not_before", f"must be at most {limits.MAX_DELAY_S:g} seconds ahead")
    return at_s


def _check_epoch(not_before: object) -> float:
    try:
        return check_number("not_before", not_before, low=0, high=_LATEST_S)
    except InvalidRequest:
        raise InvalidRequest(
            "not_before", "must be a datetime, a timedelta or seconds since the epoch"
        ) from None


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _optional_ms(seconds: float | None) -> int | None:
    return None if seconds is None else _ms(seconds)
