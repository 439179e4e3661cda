"""What the service counts and times, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bidmatch import __version__
from service.answers import Answer
from service.engine import Engine

SECONDS = (
    50e-6,
    100e-6,
    250e-6,
    500e-6,
    1e-3,
    2.5e-3,
    5e-3,
    10e-3,
    25e-3,
    50e-3,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
# The time a series was made is a series of its own, which no one asks for.
disable_created_metrics()

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
CLIENT_LEFT = 499


class Telemetry:
    """The metrics of one service, in a registry of their own.

    Args:
        engine: the engine whose bundle is served.
    """

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.requests = Counter(
            "bidmatch_requests_total",
            "Requests answered, by route, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.request_seconds = self._seconds("request", "Whole requests.", ["route"])
        self.queue_seconds = self._seconds("queue", "Requests waiting for a batch.")
        self.tokenise_seconds = self._seconds("tokenise", "Normalising and tokenising a batch.")
        self.encode_seconds = self._seconds("encode", "Encoding a batch.")
        self.search_seconds = self._seconds("search", "Searching for a batch.")
        self.rescore_seconds = self._seconds("rescore", "Re-scoring what was found for a batch.")
        self.batch_queries = Histogram(
            "bidmatch_batch_queries",
            "Queries in a batch.",
            buckets=[2**i for i in range(13)],
            registry=self.registry,
        )
        self.queue_depth = Gauge("bidmatch_queue_depth", "Queries waiting.", registry=self.registry)
        self.matches = Histogram(
            "bidmatch_matches_returned",
            "Matches of a query.",
            buckets=[0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
            registry=self.registry,
        )
        self.dropped = Counter(
            "bidmatch_dropped_total",
            "Requests dropped: the queue was full, the deadline passed, or the client left.",
            ["reason"],
            registry=self.registry,
        )
        for reason in ("queue_full", "deadline", "client_left"):
            self.dropped.labels(reason)
        manifest = engine.bundle.manifest
        self._info("build", "The software.", {"version": __version__})
        self._info(
            "bundle",
            "The bundle that answers.",
            {"bundle": engine.bundle_id, "created": manifest.created, "phrases": str(len(engine))},
        )
        self._info(
            "model",
            "The model in the bundle.",
            {
                "model": manifest.model.id,
                "kind": manifest.model.kind,
                "dim": str(manifest.dim),
                "precision": manifest.encoder.precision,
                "wide_dim": str(manifest.rescore.dim if manifest.rescore else 0),
                "candidates": str(engine.candidates),
            },
        )

    def _seconds(self, step: str, what: str, labels: list[str] | None = None) -> Histogram:
        return Histogram(
            f"bidmatch_{step}_duration_seconds", what, labels or [], buckets=SECONDS, registry=self.registry
        )

    def _info(self, name: str, what: str, labels: dict[str, str]) -> None:
        gauge = Gauge(f"bidmatch_{name}_info", what, list(labels), registry=self.registry)
        gauge.labels(**labels).set(1)

    def batch_started(self, queries: int, waits: list[float]) -> None:
        """A batch left the queue; `waits` are the seconds that its requests waited."""
        self.batch_queries.observe(queries)
        for wait in waits:
            self.queue_seconds.observe(wait)

    def batch_done(self, answers: list[Answer]) -> None:
        """A call of the engine was answered."""
        timings = answers[0].timings
        self.tokenise_seconds.observe(timings.tokenise)
        self.encode_seconds.observe(timings.encode)
        self.search_seconds.observe(timings.search)
        if timings.rescore:
            self.rescore_seconds.observe(timings.rescore)
        for answer in answers:
            self.matches.observe(answer.count)


class CountRequests:
    """ASGI middleware: counts and times each request."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry):
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and see how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # Paths and methods are the client's to invent, so what isn't known counts as one.
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._telemetry.requests.labels(route, method, str(status)).inc()
            self._telemetry.request_seconds.labels(route).observe(time.perf_counter() - started)
