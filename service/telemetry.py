"""What the service counts and times, for Prometheus; of all workers together, whichever is asked.

Workers share a folder (`PROMETHEUS_MULTIPROC_DIR`, set before this is imported): each counts in files of its
own there, and whoever is asked adds them up. Without the folder a process counts for itself.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bidmatch import __version__
from service.answers import Answer
from service.cache import Kept
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
SCORES = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
# Of which query coverage and matches per query are told.
_LATEST_BATCHES = 2000
_HITS_TOGETHER = 256
# Ratios of the latest queries and samples of all workers: part, whole, what it is.
_RATIOS = {
    "query_coverage": (
        "latest_matched",
        "latest_queries",
        "Share of the latest queries that had a match.",
    ),
    "matches_per_query": ("latest_matches", "latest_queries", "Mean matches of the latest queries."),
    "recall": (
        "latest_hits",
        "latest_wanted",
        "Of exact search's k best, the share that the index found, of the latest samples.",
    ),
}
_PARTS = {name for part, whole, _ in _RATIOS.values() for name in (part, whole)}
DROPS = ("queue_full", "deadline", "client_left", "index")
# The time a series was made is a series of its own, which no one asks for.
disable_created_metrics()

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Telemetry:
    """The metrics of one service."""

    def __init__(self) -> None:
        self._folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered.", ["route", "method", "status"])
        self.request_seconds = self._seconds("request", "Whole requests.", ["route"])
        self.queue_seconds = self._seconds("queue", "Requests waiting for a batch.")
        self.tokenise_seconds = self._seconds("tokenise", "Normalising and tokenising a batch.", ["bundle"])
        self.encode_seconds = self._seconds("encode", "Encoding a batch.", ["bundle"])
        self.search_seconds = self._seconds("search", "Searching for a batch.", ["bundle"])
        self.rescore_seconds = self._seconds("rescore", "Re-scoring what was found for a batch.", ["bundle"])
        self.batch_queries = self._histogram(
            "batch_queries", "Queries in a batch.", [], [2**i for i in range(13)]
        )
        self.queue_depth = self._gauge("queue_depth", "Queries waiting.")
        self.matches = self._histogram(
            "matches_returned",
            "Matches of a query.",
            ["bundle"],
            [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
        )
        self.best_scores = self._histogram(
            "best_score", "Score of the best match that search found for a query.", ["bundle"], SCORES
        )
        self.queries = self._counter(
            "queries", "Queries answered, with a match or without.", ["bundle", "matched"]
        )
        self._parts = {name: self._gauge(name, "", labels=["bundle"]) for name in _PARTS}
        self._latest: deque[tuple[str, int, int, int]] = deque(maxlen=_LATEST_BATCHES)
        self.dropped = self._counter(
            "dropped",
            "Requests dropped: queue full, deadline passed, client left, or index gone.",
            ["reason"],
        )
        for reason in DROPS:
            self.dropped.labels(reason)
        self.clients_refused = self._counter(
            "clients_refused", "Clients refused or dropped before a request was read.", ["reason"]
        )
        self.cache_hits = self._counter("cache_hits", "Queries answered from the cache.")
        self.cache_misses = self._counter("cache_misses", "Queries that the cache had no answer to.")
        self.cache_dropped = self._counter("cache_invalidated", "Answers dropped as live phrases changed.")
        self.cache_bytes = self._gauge("cache_bytes", "Bytes of answers in the cache.")
        self.live_phrases = self._gauge("live_phrases", "Live phrases that can be matched.", "livemax")
        self.live_unlinked = self._gauge(
            "live_unlinked", "Live rows that are searched one by one.", "livemax"
        )
        self.live_sequence = self._gauge(
            "live_sequence", "Latest change of the live phrases in effect.", "livemin"
        )
        self.canary_hits = self._counter(
            "canary_hits", "Of exact search's best, those that the index found.", ["bundle"]
        )
        self.canary_wanted = self._counter(
            "canary_wanted", "Best phrases that exact search found for samples.", ["bundle"]
        )
        self.canary_seconds = self._counter("canary_seconds", "Processor time that checking recall took.")
        self.reloads = self._counter(
            "reloads", "Bundles that were to take over, by what became of it.", ["outcome"]
        )
        for outcome in ("taken", "refused"):
            self.reloads.labels(outcome)
        self.degraded = self._gauge(
            "degraded", "Workers that run on another device than was wanted, or cannot follow the store."
        )
        self._bundles = self._gauge(
            "bundle_info", "The bundle that answers.", "livemostrecent", ["bundle", "created", "phrases"]
        )
        self._models = self._gauge(
            "model_info",
            "The model in the bundle.",
            "livemostrecent",
            ["model", "kind", "dim", "precision", "wide_dim", "candidates", "provider"],
        )
        self._gauge("build_info", "The software.", "livemax", ["version"]).labels(__version__).set(1)
        self._hits: dict[str, list[Kept]] = {}
        self._info: list[Any] = []
        self._series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"bidmatch_{name}_total", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, over: str = "livesum", labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"bidmatch_{name}", what, labels, registry=self.registry, multiprocess_mode=over)  # type: ignore[arg-type]

    def _histogram(self, name: str, what: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(f"bidmatch_{name}", what, labels, buckets=buckets, registry=self.registry)

    def _seconds(self, step: str, what: str, labels: Sequence[str] = ()) -> Histogram:
        return self._histogram(f"{step}_duration_seconds", what, labels, SECONDS)

    def serves(self, engine: Engine) -> None:
        """Another bundle answers from now on."""
        for info in self._info:
            info.set(0)
        manifest = engine.bundle.manifest
        self._info = [
            self._bundles.labels(engine.bundle_id, manifest.created, str(len(engine))),
            self._models.labels(
                manifest.model.id,
                manifest.model.kind,
                str(manifest.dim),
                engine.encoder.precision,
                str(manifest.rescore.dim if manifest.rescore else 0),
                str(engine.candidates),
                engine.encoder.providers[0].removesuffix("ExecutionProvider").lower(),
            ),
        ]
        for info in self._info:
            info.set(1)
        bundle = engine.bundle_id
        for counter in (self.canary_hits, self.canary_wanted):
            counter.labels(bundle)
        for matched in ("false", "true"):
            self.queries.labels(bundle, matched)
        steps = [self.tokenise_seconds, self.encode_seconds, self.search_seconds]
        for seconds in [*steps, self.rescore_seconds] if engine.rescores else steps:
            seconds.labels(bundle)

    def batch_started(self, queries: int, waits: list[float]) -> None:
        """A batch left the queue; `waits` are the seconds that its requests waited."""
        self.batch_queries.observe(queries)
        observe_all(self.queue_seconds, waits)

    def batch_done(self, engine: Engine, answers: Sequence[Answer]) -> None:
        """A batch was answered by an engine."""
        bundle = engine.bundle_id
        for timings in {id(answer.timings): answer.timings for answer in answers}.values():
            self.tokenise_seconds.labels(bundle).observe(timings.tokenise)
            self.encode_seconds.labels(bundle).observe(timings.encode)
            self.search_seconds.labels(bundle).observe(timings.search)
            if timings.rescore:
                self.rescore_seconds.labels(bundle).observe(timings.rescore)
        self._queries_answered(bundle, answers)

    def from_cache(self, engine: Engine, kept: Sequence[Kept]) -> None:
        """The cache of an engine's answers had those to these queries; called by the event loop's thread.

        They are counted some together, and when metrics are read, which keeps the way of a hit short.
        """
        hits = self._hits.setdefault(engine.bundle_id, [])
        hits.extend(kept)
        if len(hits) >= _HITS_TOGETHER:
            self._count_hits()

    def _count_hits(self) -> None:
        hits, self._hits = self._hits, {}
        for bundle, kept in hits.items():
            self.cache_hits.inc(len(kept))
            self._queries_answered(bundle, kept)

    def _queries_answered(self, bundle: str, answers: Sequence[Answer] | Sequence[Kept]) -> None:
        counts = [answer.count for answer in answers]
        observe_all(self.matches.labels(bundle), counts)
        observe_all(self.best_scores.labels(bundle), [one.best for one in answers if one.best == one.best])
        matched = sum(map(bool, counts))
        self._latest.append((bundle, len(counts), matched, sum(counts)))
        if matched:
            self.queries.labels(bundle, "true").inc(matched)
        if matched < len(counts):
            self.queries.labels(bundle, "false").inc(len(counts) - matched)

    def refresh(self, engine: Engine) -> None:
        """Bring what is counted now and then, and the gauges of the latest queries, up to date."""
        self._count_hits()
        bundle = engine.bundle_id
        mine = [batch[1:] for batch in list(self._latest) if batch[0] == bundle]
        if mine:
            for name, column in zip(
                ("latest_queries", "latest_matched", "latest_matches"), zip(*mine, strict=True), strict=True
            ):
                self._parts[name].labels(bundle).set(sum(column))

    def latest_recall(self, bundle: str, hits: int, wanted: int) -> None:
        """Of exact search's best for the latest samples, `wanted`, the index found `hits`."""
        self._parts["latest_hits"].labels(bundle).set(hits)
        self._parts["latest_wanted"].labels(bundle).set(wanted)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered. Unknown routes and methods, a client's to invent, count as one."""
        series = self._series.get((route, method, status))
        if series is None:
            known = method if method in _METHODS else "other"
            series = self.requests.labels(route, known, str(status)), self.request_seconds.labels(route)
            if known == method:
                self._series[route, method, status] = series
        counter, times = series
        counter.inc()
        times.observe(seconds)

    def refused_client(self, reason: str) -> None:
        """A connection was refused or dropped before the application saw a request."""
        self.clients_refused.labels(reason).inc()

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        registry = CollectorRegistry()
        if self._folder is None:
            registry.register(_Ratios(self.registry))
        else:
            registry.register(_Ratios(multiprocess.MultiProcessCollector(None, path=self._folder)))
            registry.register(_Processes(Path(self._folder)))
        return generate_latest(registry)


def observe_all(histogram: Histogram, values: Sequence[float]) -> None:
    """`histogram.observe` of many values, at the cost of about one."""
    if not values:
        return
    bounds = histogram._upper_bounds
    buckets: dict[int, int] = {}
    for value in values:
        at = bisect_left(bounds, value)
        buckets[at] = buckets.get(at, 0) + 1
    histogram._sum.inc(sum(values))
    for at, count in buckets.items():
        histogram._buckets[at].inc(count)


class _Ratios(Collector):
    """What another collector has, with ratios over all workers in place of their parts."""

    def __init__(self, of: Collector):
        self._of = of

    def collect(self) -> Iterator[Metric]:
        """The other's families but the parts, then the ratios by bundle."""
        parts: dict[str, dict[str, float]] = {}
        for family in self._of.collect():
            name = family.name.removeprefix("bidmatch_")
            if name in _PARTS:
                parts[name] = {one.labels["bundle"]: one.value for one in family.samples}
            else:
                yield family
        for name, (part, whole, what) in _RATIOS.items():
            ratio = GaugeMetricFamily(f"bidmatch_{name}", what, labels=["bundle"])
            for bundle, of in parts.get(whole, {}).items():
                if of:
                    ratio.add_metric([bundle], parts.get(part, {}).get(bundle, 0.0) / of)
            yield ratio


class _Processes(Collector):
    """Memory and processor time of the service's processes, by the numbers that they left in the folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def collect(self) -> list[GaugeMetricFamily]:
        """Read them from /proc; nothing where the system has none."""
        memory = GaugeMetricFamily(
            "bidmatch_process_resident_memory_bytes", "Resident memory.", labels=["process"]
        )
        seconds = GaugeMetricFamily(
            "bidmatch_process_cpu_seconds_total", "Processor time used.", labels=["process"]
        )
        for file in sorted(self._folder.glob("*.pid")):
            try:
                process = Path("/proc") / file.read_text().strip()
                resident = int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
                fields = (process / "stat").read_text().rpartition(")")[2].split()
            except (OSError, ValueError, IndexError):
                continue
            memory.add_metric([file.stem], resident)
            seconds.add_metric([file.stem], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return [memory, seconds]
