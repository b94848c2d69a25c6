"""Tokenmill's client: enqueue generation requests on Redis and stream every token back."""

from ._async_client import AsyncClient
from ._async_stream import AsyncTokenStream
from ._client import Client
from ._explain import Explanation
from ._status import Handle, Status
from ._stream import TokenStream
from ._timeline import TimelineEntry
from ._version import __version__
from .errors import (
    AuthenticationFailed,
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolError,
    QueueFull,
    QueueUnavailable,
    RequestCancelled,
    RequestConflict,
    RequestDead,
    RequestFailed,
    RequestTooLarge,
    ResultTimeout,
    StreamDiverged,
    TokenmillError,
    UnknownRequest,
    UnsupportedParameter,
)
from .protocol import (
    Completion,
    EndEvent,
    Event,
    Message,
    RewindEvent,
    SamplingParams,
    StartEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncTokenStream",
    "AuthenticationFailed",
    "Client",
    "Completion",
    "ConfigurationError",
    "DeadlineExceeded",
    "EndEvent",
    "Event",
    "Explanation",
    "Handle",
    "InvalidRequest",
    "Message",
    "ProtocolError",
    "QueueFull",
    "QueueUnavailable",
    "RequestCancelled",
    "RequestConflict",
    "RequestDead",
    "RequestFailed",
    "RequestTooLarge",
    "ResultTimeout",
    "RewindEvent",
    "SamplingParams",
    "StartEvent",
    "Status",
    "StreamDiverged",
    "TimelineEntry",
    "TokenEvent",
    "TokenLogprob",
    "TokenStream",
    "TokenmillError",
    "UnknownRequest",
    "UnsupportedParameter",
    "Usage",
    "__version__",
]
