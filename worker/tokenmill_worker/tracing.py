"""The spans of a worker: one for each attempt, made when it is over from the times it noted.

So the hot path knows nothing of tracing, and a token makes no span. An attempt's phases follow one
another without gaps: lease (log read, validated, tokenized), prefill, decode, finish (everything
stored). The time in the queue is a span of its own beside the first attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tokenmill._span_attributes import (
    Attributes,
    destination_of,
    message_attributes,
    process_attributes,
    request_attributes,
    span_name,
)
from tokenmill._trace_context import TraceContext
from tokenmill._tracing import TRACER
from tokenmill._tracing_setup import is_wanted, set_up_tracing
from tokenmill.errors import ConfigurationError
from tokenmill.keys import Keyspace

from .delivery import Delivery, Ending
from .errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

#: How an attempt went: it ended the request, its lease was lost, or it was given back.
Outcome = Literal["ended", "lost", "released"]
#: Gets every attempt that is over. `ending` belongs to "ended".
OnAttempt = Callable[[Keyspace, Delivery, Outcome, Ending | None], None]


def no_tracing(
    keys: Keyspace, delivery: Delivery, outcome: Outcome, ending: Ending | None = None
) -> None:
    """Without a place for spans to go."""


@asynccontextmanager
async def tracing(worker_id: str, model_name: str) -> AsyncIterator[OnAttempt]:
    """Whom to tell of attempts meanwhile. At the end what is left is sent.

    Raises:
        StartupError: the environment asks for traces, but the packages are not there.
    """
    try:
        close = set_up_tracing("tokenmill-worker", {"service.instance.id": worker_id})
    except ConfigurationError as error:
        raise StartupError(str(error)) from None
    if not is_wanted():
        yield no_tracing
        return
    from opentelemetry.trace import get_tracer

    try:
        yield AttemptSpans(get_tracer(TRACER), worker_id, model_name)
    finally:
        await asyncio.to_thread(close)


@dataclass(frozen=True, slots=True)
class AttemptSpans:
    """Call it with each attempt that is over."""

    tracer: Tracer
    worker_id: str
    model_name: str
    clock: Callable[[], float] = field(default=time.monotonic)

    def __call__(
        self, keys: Keyspace, delivery: Delivery, outcome: Outcome, ending: Ending | None = None
    ) -> None:
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode, get_current_span
        from opentelemetry.trace import set_span_in_context as inside

        now_s = self.clock()
        to_ns = _Epoch(time.time_ns(), now_s)
        lease, leased_ns = delivery.lease, to_ns(delivery.times.leased_s)
        parent = _context_of(lease.traceparent, lease.tracestate)
        if lease.attempt == 1:
            self.tracer.start_span(
                f"queue {destination_of(keys)}", context=parent,
                start_time=leased_ns - lease.waited_ms * 1_000_000,
                attributes=message_attributes(keys, lease.request_id)
                | {"tokenmill.priority_class": lease.ready_class, "tokenmill.tenant": lease.tenant},
            ).end(leased_ns)  # fmt: skip
        asked = request_attributes(lease.body)
        producer = get_current_span(parent).get_span_context()
        span = self.tracer.start_span(
            span_name(asked, self.model_name), context=parent, kind=SpanKind.CONSUMER,
            start_time=leased_ns, links=[Link(producer)] if producer.is_valid else [],
            attributes=asked | process_attributes(keys, lease.request_id, self.worker_id),
        )  # fmt: skip
        within = inside(span)
        for name, began_s, ended_s in _phases(delivery, now_s):
            phase = self.tracer.start_span(name, context=within, start_time=to_ns(began_s))
            phase.set_attributes(_phase_attributes(name, delivery))
            phase.end(to_ns(ended_s))
        span.set_attributes(self._result(delivery, outcome, ending))
        if ending is not None and ending.status != "done":
            span.set_status(Status(StatusCode.ERROR))
        span.end(to_ns(now_s))

    def _result(self, delivery: Delivery, outcome: Outcome, ending: Ending | None) -> Attributes:
        lease, latest = delivery.lease, delivery.latest
        result: Attributes = {
            "gen_ai.response.model": self.model_name,
            "gen_ai.response.id": lease.request_id,
            "gen_ai.usage.input_tokens": delivery.prompt_tokens or 0,
            "gen_ai.usage.output_tokens": delivery.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": latest.num_cached_tokens if latest else 0,
            "gen_ai.latency.time_in_queue": lease.waited_ms / 1000,
            "tokenmill.attempt": lease.attempt,
            "tokenmill.outcome": outcome,
            "tokenmill.resumed_tokens": delivery.num_resumed_tokens,
            "tokenmill.preemptions": latest.num_preemptions if latest else 0,
        }
        if ending is not None:
            result["gen_ai.response.finish_reasons"] = [ending.finish_reason]
            if ending.code is not None:
                result["error.type"] = ending.code
        return result


@dataclass(frozen=True, slots=True)
class _Epoch:
    """From the monotonic clock, which the worker measures with, to that of spans."""

    now_ns: int
    now_s: float

    def __call__(self, moment_s: float) -> int:
        return self.now_ns - round((self.now_s - moment_s) * 1e9)


def _context_of(traceparent: str, tracestate: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = TraceContext.parse(traceparent, tracestate).fields()
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def _phases(delivery: Delivery, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Those that the attempt came to, each beginning where the one before ended."""
    times = delivery.times
    began_s = times.leased_s
    for name, ended_s in (
        ("lease", times.submitted_s),
        ("prefill", times.first_token_s),
        ("decode", times.last_token_s),
    ):
        if ended_s is None:
            break
        yield name, began_s, ended_s
        began_s = ended_s
    yield "finish", began_s, now_s


def _phase_attributes(name: str, delivery: Delivery) -> Attributes:
    latest = delivery.latest
    if name == "prefill" and latest is not None:
        return {
            "tokenmill.prefill_chunks": latest.num_prefill_chunks,
            "gen_ai.usage.cache_read.input_tokens": latest.num_cached_tokens,
        }
    if name == "decode" and latest is not None:
        return {
            "gen_ai.usage.output_tokens": delivery.num_tokens - delivery.num_resumed_tokens,
            "tokenmill.preemptions": latest.num_preemptions,
        }
    return {}
