"""A collector of traces: a process that takes OTLP over HTTP, and the spans that it got.

Run as a script it listens on a free port of 127.0.0.1, prints it, and appends each span to a file,
one JSON object a line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support_worker_process import clean_environment


@dataclass(frozen=True)
class Span:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[str]
    service: str
    is_error: bool

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class Collector:
    endpoint: str
    file: Path

    def spans(self) -> list[Span]:
        return [Span(**json.loads(line)) for line in self.file.read_text().splitlines()]

    def trace_of(self, request_id: str) -> list[Span]:
        """Every span of the traces that this request occurs in, by their begin.

        Of those that begin together, one without any length comes first (a queue that was not
        waited in), and then the longest, around its parts.
        """
        spans = self.spans()
        traces = {
            s.trace_id for s in spans if s.attributes.get("tokenmill.request.id") == request_id
        }
        return sorted(
            (s for s in spans if s.trace_id in traces),
            key=lambda span: (span.start_ns, span.end_ns > span.start_ns, -span.end_ns),
        )


@contextmanager
def collector(folder: Path) -> Iterator[Collector]:
    file = folder / "spans.jsonl"
    file.touch()
    with subprocess.Popen(
        [sys.executable, __file__, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        try:
            yield Collector(f"http://127.0.0.1:{port}", file)
        finally:
            process.terminate()


def tree(spans: list[Span]) -> str:
    """The spans under their parents, each with its begin since the first and its length, in ms."""
    began_ns = min(span.start_ns for span in spans)
    lines: list[str] = []

    def add(parent_id: str, depth: int) -> None:
        for span in spans:
            if span.parent_id == parent_id:
                at_ms = (span.start_ns - began_ns) / 1e6
                name = "  " * depth + span.name
                lines.append(f"{name:<44}{at_ms:9.1f} +{span.seconds * 1e3:8.1f}  {span.service}")
                add(span.span_id, depth + 1)

    known = {span.span_id for span in spans}
    for root in sorted({span.parent_id for span in spans} - known):
        add(root, 0)
    return "\n".join(lines)


class _Handler(BaseHTTPRequestHandler):
    file: Path

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        lines = [json.dumps(span) for span in _spans(request)]
        with self.file.open("a") as out:
            out.write("".join(f"{line}\n" for line in lines))
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def _spans(request: Any) -> Iterator[dict[str, Any]]:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as Proto
    from opentelemetry.proto.trace.v1.trace_pb2 import Status

    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "name": span.name,
                    "kind": Proto.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    "trace_id": span.trace_id.hex(),
                    "span_id": span.span_id.hex(),
                    "parent_id": span.parent_span_id.hex(),
                    "start_ns": span.start_time_unix_nano,
                    "end_ns": span.end_time_unix_nano,
                    "attributes": _attributes(span.attributes),
                    "links": [link.span_id.hex() for link in span.links],
                    "service": service,
                    "is_error": span.status.code == Status.STATUS_CODE_ERROR,
                }


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def main() -> None:
    handler = type("Handler", (_Handler,), {"file": Path(sys.argv[1])})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
