"""Setting OpenTelemetry up for our own programs, if the environment says where spans are to go.

Everything else is OpenTelemetry's own: `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`,
`OTEL_RESOURCE_ATTRIBUTES` and the others are read by its SDK.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Final

from ._version import __version__
from .errors import ConfigurationError

#: Spans are sent if one of these is set.
ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_TIMEOUT_S: Final = 3.0


def is_wanted() -> bool:
    return any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


def set_up_tracing(service: str, facts: Mapping[str, str] | None = None) -> Callable[[], None]:
    """Send this process's spans from now on, over OTLP with HTTP; nothing unless `is_wanted`.

    `service` is the service's name unless OTEL_SERVICE_NAME says another, `facts` are further
    attributes of the resource. Call what is returned at the end: it sends what is left, for
    CLOSE_TIMEOUT_S at most.

    Raises:
        ConfigurationError: it is wanted, but the packages are not there.
    """
    if not is_wanted():
        return lambda: None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{ENDPOINT_VARIABLES[0]} is set, but sending traces needs {error.name}: "
            "pip install 'tokenmill[otel]', or unset it"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME", service)
    resource = Resource.create(
        {"service.name": name, "service.version": __version__, **(facts or {})}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def close() -> None:
        # A thread that nobody has to wait for: a collector that is away must not hold up an end.
        closing = threading.Thread(target=provider.shutdown, name="close tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    return close
