"""Spans reach a collector, as part of the caller's trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list, threading.Event]]:
    """An OTLP collector that services started now send to: the spans it got, and whether there are any."""
    spans: list = []
    some = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            some.set()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield spans, some
        server.shutdown()
        thread.join()


def test_a_span_belongs_to_the_callers_trace(
    start: Callable, collector: tuple[list, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, some = collector
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with start("--traces") as server, httpx.Client(base_url=server.url) as client:
        answer = client.post(
            "/match",
            json={"query": "a private query"},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        )
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == TRACE
        assert some.wait(20)
    (span,) = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, PARENT, "POST /match")
    attributes = {one.key: one.value for one in span.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert "private" not in str(span)


def test_spans_are_sent_when_the_service_stops(
    start: Callable, collector: tuple[list, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, _ = collector
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with start("--traces") as server, httpx.Client(base_url=server.url) as client:
        assert client.post("/match", json={"query": "a"}).status_code == 200
        assert client.get("/phrases/a%2Fb").status_code == 404
        assert client.get("/nowhere").status_code == 404
        assert client.get("/readyz").status_code == 200
    names = ["GET /phrases/{id}", "GET /readyz", "GET other", "POST /match"]
    assert sorted(span.name for span in spans) == names
