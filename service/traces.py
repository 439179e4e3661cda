"""OpenTelemetry spans of requests, where they are asked for; `traceparent` of the caller is honoured."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from bidmatch import __version__
from bidmatch.base.errors import MissingDependencyError


class Traces:
    """Spans of requests; without a provider of tracers nothing happens."""

    def __init__(self, provider: Any = None, propagator: Any = None):
        self._provider, self._propagator = provider, propagator
        self._tracer = None if provider is None else provider.get_tracer("bidmatch", __version__)

    def start(self, scope: Scope) -> Any:
        """Begin the span of a request; None where there are no traces."""
        if self._tracer is None:
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return self._tracer.start_span(
            scope["method"],
            context=self._propagator.extract(headers),
            attributes={"http.request.method": scope["method"], "url.path": scope["path"][:200]},
        )

    def end(self, span: Any, route: str, status: int) -> None:
        """End it, named by the route that it took."""
        if span is not None:
            span.update_name(f"{span.name} {route}")
            span.set_attribute("http.response.status_code", status)
            span.end()

    def close(self) -> None:
        """Send what was not sent yet."""
        if self._provider is not None:
            self._provider.shutdown()


def open_traces(*, on: bool) -> Traces:
    """Traces that go where the `OTEL_*` environment variables say.

    Raises:
        MissingDependencyError: they are asked for, and the packages are not installed.
    """
    if not on:
        return Traces()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as missing:
        raise MissingDependencyError(
            f"traces need the package {missing.name}", hint="pip install '.[traces]' in bidmatch's folder"
        ) from None
    resource = Resource.create({"service.name": "bidmatch", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider, TraceContextTextMapPropagator())
