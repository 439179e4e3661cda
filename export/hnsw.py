"""Builds the HNSW index and chooses its parameters by measured recall against exact search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hnswlib
import numpy as np

from bidmatch.base.console import progress, say
from export.bundle.format import CurvePoint, IndexRecord
from export.bundle.index import exact_topk
from export.exact import exact_search
from export.graph import BuiltIndex

# (M, ef_construction), cheapest to search and smallest in memory first.
LADDER = ((16, 200), (24, 300), (32, 400), (48, 600))
# ef as multiples of the results asked for; hnswlib searches at least that wide.
_WIDTHS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_SEED = 100
_BLOCK = 20_000
_TIMED_QUERIES = 500
_BEYOND_TARGET = 2  # points of the curve above the target, to show what more recall would cost
_TIE = 1e-6


@dataclass(frozen=True)
class RecallTarget:
    """What an index must reach.

    Attributes:
        recall: recall@k against exact search, in (0, 1].
        k: see `recall`; more than the number of phrases is taken as that number.
        results: results that searches will ask for where that is more than k, as for re-scoring.
    """

    recall: float = 0.99
    k: int = 100
    results: int = 0


@dataclass(frozen=True)
class TunedIndex:
    """A built index, with ef set, and how it was chosen."""

    index: Any
    record: IndexRecord


def build_index(vectors: np.ndarray, M: int, ef_construction: int, threads: int) -> Any:
    """An hnswlib index (inner product) of all rows, label = row. With one thread always the same."""
    count, dim = vectors.shape
    index = hnswlib.Index(space="ip", dim=dim)
    index.init_index(max_elements=count, M=M, ef_construction=ef_construction, random_seed=_SEED)
    with progress(f"building HNSW index, M={M}, ef_construction={ef_construction}", count, "phrases") as step:
        for start in range(0, count, _BLOCK):
            block = np.ascontiguousarray(vectors[start : start + _BLOCK])
            index.add_items(block, np.arange(start, start + len(block)), num_threads=threads)
            step.advance(len(block))
    return index


def search(index: Any, vectors: np.ndarray, queries: np.ndarray, k: int, threads: int = 1) -> np.ndarray:
    """Rows, int64 (n, k), as `PhraseIndex.search` finds them: exactly where the graph gives fewer than k."""
    try:
        rows, _ = index.knn_query(queries, k=k, num_threads=threads)
        return np.asarray(rows).astype(np.int64)
    except RuntimeError:
        if len(queries) == 1:
            return exact_topk(queries, vectors, k)[0]
        return np.concatenate([search(index, vectors, row[None], k) for row in queries])


def recall_at_k(rows: np.ndarray, queries: np.ndarray, vectors: np.ndarray, kth_scores: np.ndarray) -> float:
    """Share of the exact top k that was found; a row that ties with the k-th best counts as one of them.

    Args:
        rows: int64 (n, k) found.
        queries: float32 (n, dim).
        vectors: float32 (L, dim).
        kth_scores: float32 (n,), the k-th best exact score of each query.
    """
    hits = 0
    for i in range(len(queries)):
        scores = vectors[rows[i]] @ queries[i]
        hits += int((scores >= kth_scores[i] - _TIE).sum())
    return hits / max(rows.size, 1)


def _time_us(index: Any, vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    times = np.empty(len(queries))
    for i in range(len(queries)):
        start = time.perf_counter_ns()
        search(index, vectors, queries[i : i + 1], k)
        times[i] = (time.perf_counter_ns() - start) / 1e3
    return times


def _curve(
    index: Any,
    vectors: np.ndarray,
    queries: np.ndarray,
    kth_scores: np.ndarray,
    target: RecallTarget,
    rung: tuple[int, int],
    threads: int,
) -> list[CurvePoint]:
    points: list[CurvePoint] = []
    k, results = target.k, target.results
    efs = sorted({min(max(1, round(results * width)), len(vectors)) for width in _WIDTHS})
    with progress(f"measuring recall@{k} and latency, M={rung[0]}", None, "settings") as step:
        for ef in efs:
            index.set_ef(ef)
            rows = search(index, vectors, queries, results, threads)[:, :k]
            times = _time_us(index, vectors, queries[:_TIMED_QUERIES], results)
            point = CurvePoint(
                M=rung[0],
                ef_construction=rung[1],
                ef=ef,
                recall=round(recall_at_k(rows, queries, vectors, kth_scores), 6),
                mean_us=round(float(times.mean()), 1),
                p99_us=round(float(np.percentile(times, 99)), 1),
            )
            points.append(point)
            step.advance(1, f"ef={ef}: recall {point.recall:.4f}, {point.mean_us:,.0f} µs")
            if sum(point.recall >= target.recall for point in points) > _BEYOND_TARGET:
                break
    return points


def tune(
    vectors: np.ndarray,
    queries: np.ndarray,
    query_source: str,
    target: RecallTarget,
    *,
    threads: int,
    build_threads: int,
    ladder: Sequence[tuple[int, int]] = LADDER,
    build: Callable[[int, int], Any] | None = None,
) -> TunedIndex:
    """The cheapest index that reaches the target: least M, then least ef; rebuilt with larger M if none does.

    Args:
        vectors: float32 (L, dim) label vectors.
        queries: float32 (n, dim) to measure with, n >= 1.
        query_source: what they are, for the record.
        target: what is to be reached; where nothing does, the best is taken and said aloud.
        threads: of the measurement of recall (latency is measured on one).
        build_threads: of the build.
        ladder: (M, ef_construction) to try, in this order.
        build: gives an index with `knn_query` and `set_ef` by M and ef_construction; None for hnswlib's
            graph, searched as it will be served.
    """
    k = min(target.k, len(vectors))
    target = RecallTarget(target.recall, k, min(max(k, target.results), len(vectors)))
    kth_scores = exact_search(queries, vectors, k, f"exact search for recall@{k}")[1][:, -1]
    curve: list[CurvePoint] = []
    best: tuple[Any, CurvePoint, float] | None = None
    for rung in ladder:
        started = time.monotonic()
        if build is None:
            index: Any = BuiltIndex(build_index(vectors, *rung, threads=build_threads), vectors)
        else:
            index = build(*rung)
        seconds = time.monotonic() - started
        points = _curve(index, vectors, queries, kth_scores, target, rung, threads)
        curve += points
        reaching = [point for point in points if point.recall >= target.recall]
        point = reaching[0] if reaching else max(points, key=lambda candidate: candidate.recall)
        if best is None or point.recall > best[1].recall or reaching:
            best = (index, point, seconds)
        if reaching:
            break
        say(f"M={rung[0]} reaches recall@{k} {point.recall:.4f} at best, not {target.recall}: trying wider")
    assert best is not None
    index, point, seconds = best
    index.set_ef(point.ef)
    reached = point.recall >= target.recall
    say(
        f"index: M={point.M}, ef_construction={point.ef_construction}, ef={point.ef}: recall@{k} of exact "
        f"search {point.recall:.4f} on {len(queries):,} {query_source}"
        + (
            f" (target {target.recall})"
            if reached
            else f", BELOW the target {target.recall}: no setting reached it"
        )
        + f"; {point.mean_us:,.0f} µs a query, p99 {point.p99_us:,.0f} µs, one thread"
    )
    record = IndexRecord(
        M=point.M,
        ef_construction=point.ef_construction,
        ef=point.ef,
        k=k,
        results=target.results,
        target_recall=target.recall,
        recall=point.recall,
        reached=reached,
        queries=len(queries),
        query_source=query_source,
        seed=_SEED,
        build_threads=build_threads,
        build_seconds=round(seconds, 2),
        curve=curve,
    )
    return TunedIndex(index, record)
