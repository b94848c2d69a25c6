"""A client's spans, if the application uses OpenTelemetry.

The SDK sets nothing up and imports nothing for it: where nobody has loaded `opentelemetry.trace`,
nobody can want spans.

One span for the request, from the enqueue to the end of its stream, and in it one for sending. The
trace travels with the request, and the worker's spans join it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ._trace_context import NO_TRACE, TraceContext
from .keys import Keyspace
from .protocol import EndEvent, Event, TokenEvent

#: The name of our tracer.
TRACER: Final = "tokenmill"

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


def _tracer() -> Tracer | None:
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    tracer: Tracer = api.get_tracer(TRACER)
    return tracer


@contextmanager
def sending(keys: Keyspace, request_id: str) -> Iterator[TraceContext]:
    """The span of an enqueue; yields what is to travel with the request."""
    tracer = _tracer()
    if tracer is None:
        yield NO_TRACE
        return
    from opentelemetry.trace import SpanKind

    from ._span_attributes import destination_of, message_attributes

    attributes = message_attributes(keys, request_id) | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    with tracer.start_as_current_span(
        f"send {destination_of(keys)}", kind=SpanKind.PRODUCER, attributes=attributes
    ):
        yield current_trace()


def current_trace() -> TraceContext:
    """That of the caller; none without OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return NO_TRACE
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return TraceContext(**carrier)


class RequestSpan:
    """From the enqueue to the end of the stream. For one consumer; `close` may come twice."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span
        self._began_s = time.monotonic()

    @classmethod
    def start(cls, request_id: str, body: str) -> RequestSpan:
        tracer = _tracer()
        if tracer is None:
            return NO_SPAN
        from opentelemetry.trace import SpanKind

        from ._span_attributes import request_attributes, span_name

        attributes = request_attributes(body) | {"tokenmill.request.id": request_id}
        name = span_name(attributes)
        return cls(tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Spans that begin meanwhile are this one's children."""
        if self._span is None:
            yield
            return
        from opentelemetry.trace import use_span

        with use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def saw(self, event: Event) -> None:
        """The consumer got an event."""
        if self._span is None:
            return
        if isinstance(event, TokenEvent) and event.index == 0:
            waited_s = time.monotonic() - self._began_s
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", waited_s)
        if isinstance(event, EndEvent):
            self._saw_end(self._span, event)

    def failed(self, error: BaseException) -> None:
        if self._span is not None:
            self._fail(self._span, type(error).__name__)

    def close(self) -> None:
        if self._span is not None:
            self._span.end()
            self._span = None

    def _saw_end(self, span: Span, event: EndEvent) -> None:
        if event.finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [event.finish_reason])
        if event.status != "done":
            self._fail(span, event.code or event.status)
        self.close()

    def _fail(self, span: Span, error_type: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("error.type", error_type)
        span.set_status(Status(StatusCode.ERROR))


NO_SPAN: Final = RequestSpan()
