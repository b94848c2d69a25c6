"""Everything the SDK raises on purpose.

TokenmillError
├── ConfigurationError          a URL or option is wrong
├── QueueUnavailable            Redis cannot be reached, is loading, or is out of memory
│   └── AuthenticationFailed    wrong user or password
├── InvalidRequest              refused: names the field and the limit, never the value
│   ├── UnsupportedParameter    known to the field, not offered here
│   └── RequestTooLarge         the encoded request or the prompt is over a limit
├── QueueFull                   refused for now; `retry_after_s` says when to try again
├── RequestConflict             the id is taken by a request with another content
├── UnknownRequest              no such id, or its retention is over
├── ResultTimeout               the answer is not there yet; the request goes on
├── StreamDiverged              tokens already delivered were withdrawn (data loss in Redis)
├── ProtocolError               what stands in Redis does not follow the protocol
└── RequestFailed               the request ended without a completion; has `code` and `completion`
    ├── RequestCancelled
    ├── DeadlineExceeded
    └── RequestDead             given up after too many attempts; it is in the dead letters
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .protocol import Completion


class TokenmillError(Exception):
    """Base of the tree."""


class ConfigurationError(TokenmillError):
    """A URL or an option is wrong; the text names it and the way out."""


class QueueUnavailable(TokenmillError):
    """Redis cannot be reached, is loading its data, or refuses writes."""


class AuthenticationFailed(QueueUnavailable):
    """Redis refused the user or the password."""


class InvalidRequest(TokenmillError):
    """The request is wrong. `field` is the parameter's name; the value is never repeated."""

    code = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnsupportedParameter(InvalidRequest):
    """The parameter is known to the field, but Tokenmill does not offer it."""

    code = "unsupported"


class RequestTooLarge(InvalidRequest):
    """The encoded request, or its prompt, is over a limit."""

    code = "too_long"


class QueueFull(TokenmillError):
    """The queue, or the tenant's share of it, is full. `retry_after_s` is a hint, in seconds."""

    def __init__(
        self, message: str, *, code: str = "queue_full", retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class RequestConflict(TokenmillError):
    """The request id is taken by a request with another content."""


class UnknownRequest(TokenmillError):
    """No request with this id, or its retention is over."""


class ResultTimeout(TokenmillError):
    """The request did not end within `timeout_s`; it goes on."""


class StreamDiverged(TokenmillError):
    """Redis lost tokens that were already delivered, and the new attempt chose others."""

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(
            f"request {request_id}: tokens from index {index} on were withdrawn; "
            "read events() to handle the rewind"
        )
        self.request_id = request_id
        self.index = index


class ProtocolError(TokenmillError):
    """An event log that contradicts itself: a writer that does not follow the protocol."""


class RequestFailed(TokenmillError):
    """The request ended without a completion. `code` is from the protocol's closed list;
    `completion` holds what was generated until then."""

    def __init__(
        self, request_id: str, code: str, message: str, *, completion: Completion | None = None
    ) -> None:
        super().__init__(f"request {request_id} ended with {code}: {message}")
        self.request_id = request_id
        self.code = code
        self.message = message
        self.completion = completion


class RequestCancelled(RequestFailed):
    """Somebody cancelled the request."""


class DeadlineExceeded(RequestFailed):
    """The deadline passed before the request ended."""


class RequestDead(RequestFailed):
    """Given up after too many attempts; see the dead letters."""


def failure(
    request_id: str, status: str, code: str, message: str, completion: Completion | None
) -> RequestFailed:
    """The exception for a terminal event that is not `done`."""
    by_status = {
        "cancelled": RequestCancelled,
        "expired": DeadlineExceeded,
        "dead": RequestDead,
    }
    return by_status.get(status, RequestFailed)(request_id, code, message, completion=completion)
