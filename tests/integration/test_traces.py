"""One trace across the queue: client, Redis and worker are processes, and so is the collector."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support_otlp import Collector, Span, collector, tree
from support_redis import unique_keyspace
from support_worker_process import Pool, clean_environment, eventually, pool_of_workers
from tokenmill._tracing_setup import ENDPOINT_VARIABLES
from tokenmill.embedded import EmbeddedServer
from tokenmill.scripts import run
from tokenmill_worker.tracing import no_tracing, tracing

STEP_S = 0.02
TOKENS = 80
PHASES = ["lease", "prefill", "decode", "finish"]
#: A program that has set OpenTelemetry up, and times its second request itself.
CLIENT = """
import json, sys, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from tokenmill._tracing_setup import set_up_tracing
from tokenmill import Client

close = set_up_tracing("shop")
url, namespace, tokens, how = sys.argv[1:]
with Client(url, namespace=namespace) as client:
    client.generate("hello", max_tokens=1)
    with trace.get_tracer("shop").start_as_current_span("order"):
        began_s = time.perf_counter()
        if how == "stream":
            done = client.generate("canary", max_tokens=int(tokens), temperature=0.5)
            request_id = done.id
        else:
            request_id = client.submit("canary", max_tokens=int(tokens)).id
            client.result(request_id)
        seconds = time.perf_counter() - began_s
print(json.dumps({"id": request_id, "seconds": seconds}))
close()
"""


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("collector")) as it:
        yield it


@pytest.fixture(scope="module")
def pool(
    server: EmbeddedServer, spans: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    with (
        pytest.MonkeyPatch.context() as patch,
        pool_of_workers(server, unique_keyspace(), tmp_path_factory.mktemp("workers")) as pool,
    ):
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        pool.start_ready("traced", step_s=STEP_S)
        yield pool


def ask(pool: Pool, spans: Collector, how: str, tokens: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, pool.server.url, pool.keys.namespace, str(tokens), how],
        env=clean_environment() | {"OTEL_EXPORTER_OTLP_ENDPOINT": spans.endpoint},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def complete_trace(spans: Collector, request_id: str) -> list[Span]:
    """Once the worker's spans are there too; those of the client are sent when it ends."""

    def found() -> list[Span] | None:
        trace = spans.trace_of(request_id)
        return trace if any(span.kind == "CONSUMER" for span in trace) else None

    return eventually(found)


def test_one_trace_whose_parts_add_up_to_what_the_client_measured(
    pool: Pool, spans: Collector
) -> None:
    answer = ask(pool, spans, "stream", TOKENS)
    trace = complete_trace(spans, answer["id"])
    print(tree(trace), f"\nclient: {answer['seconds'] * 1e3:.1f} ms", sep="")  # noqa: T201

    (order, request, send, queue, attempt, *phases) = trace
    assert len({span.trace_id for span in trace}) == 1
    assert (order.name, order.service) == ("order", "shop")
    assert (request.name, request.kind, request.parent_id) == (
        "text_completion", "CLIENT", order.span_id,
    )  # fmt: skip
    assert (send.kind, send.parent_id) == ("PRODUCER", request.span_id)
    assert send.name == f"send {pool.keys.namespace}:default"
    assert (queue.kind, queue.parent_id) == ("INTERNAL", send.span_id)
    assert (attempt.kind, attempt.parent_id, attempt.links) == (
        "CONSUMER", send.span_id, [send.span_id],
    )  # fmt: skip
    assert [phase.name for phase in phases] == PHASES
    assert {phase.parent_id for phase in phases} == {attempt.span_id}
    for before, after in pairwise(phases):
        assert before.end_ns == after.start_ns
    assert sum(phase.seconds for phase in phases) == pytest.approx(attempt.seconds, abs=1e-6)
    parts = [send, queue, *phases]
    assert sum(span.seconds for span in parts) == pytest.approx(answer["seconds"], rel=0.05)
    assert request.seconds == pytest.approx(answer["seconds"], rel=0.05)


def test_what_spans_say(pool: Pool, spans: Collector) -> None:
    answer = ask(pool, spans, "submit", 5)
    trace = complete_trace(spans, answer["id"])
    by_kind = {span.kind: span for span in trace if span.name != "order"}

    send, attempt = by_kind["PRODUCER"].attributes, by_kind["CONSUMER"].attributes
    assert send["messaging.operation.type"] == "send"
    assert send["messaging.message.id"] == attempt["messaging.message.id"] == answer["id"]
    assert attempt["messaging.operation.type"] == "process"
    assert attempt["messaging.client.id"].startswith("traced-")
    assert attempt["gen_ai.operation.name"] == "text_completion"
    assert attempt["gen_ai.request.max_tokens"] == 5
    assert attempt["gen_ai.usage.output_tokens"] == 5
    assert attempt["gen_ai.usage.input_tokens"] == len("canary")
    assert attempt["gen_ai.response.finish_reasons"] == ["length"]
    assert (attempt["tokenmill.attempt"], attempt["tokenmill.outcome"]) == (1, "ended")
    assert by_kind["CONSUMER"].service == "tokenmill-worker"
    assert "canary" not in spans.file.read_text()


def test_a_trace_that_came_by_plain_xadd_is_joined(pool: Pool, spans: Collector) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    for request_id, traceparent in (
        ("traced-xadd", f"00-{trace_id}-{parent}-01"),
        ("broken-xadd", f"00-{trace_id}-nonsense-01"),
    ):
        pool.client.xadd(
            pool.keys.ready("1"),
            {
                "id": request_id, "body": '{"prompt":"x","max_tokens":2}',
                "traceparent": traceparent,
            },
        )  # fmt: skip
        pool.end(request_id)
    queue, attempt = (s for s in complete_trace(spans, "traced-xadd") if s.name not in PHASES)
    assert {queue.trace_id, attempt.trace_id} == {trace_id}
    assert {queue.parent_id, attempt.parent_id} == {parent}
    assert {span.trace_id for span in complete_trace(spans, "broken-xadd")}.isdisjoint({trace_id})


def test_a_failed_request_and_a_cancelled_one(pool: Pool, spans: Collector) -> None:
    pool.submit("refused", prompt="refuse this")
    pool.end("refused")
    pool.submit("cancelled", max_tokens=4000)
    eventually(lambda: pool.tokens("cancelled"))
    run(pool.client, pool.calls.cancel("cancelled"))
    refused, cancelled = (
        next(s for s in complete_trace(spans, name) if s.kind == "CONSUMER")
        for name in ("refused", "cancelled")
    )
    assert refused.is_error
    assert refused.attributes["error.type"] == "invalid_request"
    assert not cancelled.is_error
    assert cancelled.attributes["tokenmill.outcome"] == "lost"


def test_the_command_line_traces_too(pool: Pool, spans: Collector) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "tokenmill", "--namespace", pool.keys.namespace,
            "generate", "hello", "--max-tokens", "2", "--request-id", "from-the-shell",
        ],
        env=clean_environment()
        | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": spans.endpoint,
            "TOKENMILL_REDIS_URL": pool.server.url,
        },
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    trace = complete_trace(spans, "from-the-shell")
    assert {span.service for span in trace} == {"tokenmill-cli", "tokenmill-worker"}
    assert len({span.trace_id for span in trace}) == 1


def test_a_program_without_tracing_sends_none_along(pool: Pool) -> None:
    """With OpenTelemetry installed, which redis-py then loads by itself."""
    code = (
        "from tokenmill import Client\n"
        f"with Client({pool.server.url!r}, namespace={pool.keys.namespace!r}) as client:\n"
        "    client.generate('hello', max_tokens=1, request_id='untraced')\n"
    )
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True)
    assert pool.client.hget(pool.keys.record("untraced"), "created")
    assert pool.client.hget(pool.keys.record("untraced"), "traceparent") is None


def test_the_sdk_joins_the_tracing_that_its_program_has_set_up(pool: Pool) -> None:
    """Of the program's own making, without any variable of OpenTelemetry's."""
    code = (
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from opentelemetry.sdk.trace.export import SimpleSpanProcessor\n"
        "from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter\n"
        "from tokenmill import Client\n"
        "kept, provider = InMemorySpanExporter(), TracerProvider()\n"
        "provider.add_span_processor(SimpleSpanProcessor(kept))\n"
        "trace.set_tracer_provider(provider)\n"
        f"with Client({pool.server.url!r}, namespace={pool.keys.namespace!r}) as client:\n"
        "    client.generate('hello', max_tokens=1, request_id='own-provider')\n"
        "for span in kept.get_finished_spans():\n"
        "    trace_id = format(span.context.trace_id, '032x')\n"
        "    print(span.instrumentation_scope.name, span.kind.name, trace_id)\n"
    )
    environment = {k: v for k, v in clean_environment().items() if not k.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    spans = [line.split() for line in done.stdout.splitlines()]
    assert [(scope, kind) for scope, kind, _ in spans] == [
        ("tokenmill", "PRODUCER"), ("tokenmill", "CLIENT"),
    ]  # fmt: skip
    (trace_id,) = {trace_id for _, _, trace_id in spans}
    assert (
        pool.client.hget(pool.keys.record("own-provider"), "traceparent").split("-")[1] == trace_id
    )


async def test_a_worker_sends_nothing_unless_it_is_told_where_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    async with tracing("worker-1", "model") as on_attempt:
        assert on_attempt is no_tracing


def test_a_collector_that_is_away_holds_nothing_up(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with pool_of_workers(pool.server, unique_keyspace(), tmp_path) as lonely:
        worker = lonely.start_ready("lonely")
        lonely.submit("a", max_tokens=3)
        assert lonely.end("a")["st"] == "done"
        assert worker.terminate() == 0
