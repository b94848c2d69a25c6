"""The trace that a request belongs to, as it travels through the queue: W3C `traceparent` and
`tracestate`, https://www.w3.org/TR/trace-context/. Plain text; needs no tracing library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_TRACEPARENT: Final = re.compile(
    r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Both empty: no trace."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext:
        """From untrusted text: what is malformed counts as absent, as the standard demands."""
        if not _TRACEPARENT.fullmatch(traceparent) or traceparent.startswith("ff"):
            return NO_TRACE
        return cls(traceparent, tracestate if _TRACESTATE.fullmatch(tracestate) else "")

    def fields(self) -> dict[str, str]:
        """What travels: only what there is."""
        fields = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in fields.items() if value}


NO_TRACE: Final = TraceContext()
