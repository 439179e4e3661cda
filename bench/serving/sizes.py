"""What a search costs as phrases get more: time at equal recall, and memory a phrase, by number of phrases.

    python -m bench.serving.sizes [--json] [--work runs/bench-serving]

Random halves, quarters and eighths of the million phrases of the MiniLM bundle, an HNSW index over each (M =
16, ef_construction = 200), searched as it is served. For each of several ef: recall@10 against exact search
and the time of a search on one thread, each query once. The time at a recall of 0.98 is read off between
these, on a logarithmic scale of the share that is missed. Build time is of all cores.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.serving.bundles import EF_CONSTRUCTION, WORK, K, M, bundle_of, queries_of
from bench.serving.recipe import minilm
from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import BidmatchError
from export.bundle.encoder import QueryEncoder
from export.bundle.index import exact_topk
from export.bundle.read import open_bundle
from export.graph import BuiltIndex
from export.hnsw import build_index, recall_at_k

PARTS = (8, 4, 2, 1)
RECALL = 0.98
_EFS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
_JUDGED, _TIMED = 1000, 4000


def microseconds(index: BuiltIndex, queries: np.ndarray) -> float:
    """Median time of a search for one query."""
    times = np.empty(len(queries))
    for i in range(len(queries)):
        started = time.perf_counter_ns()
        index.knn_query(queries[i : i + 1], K)
        times[i] = (time.perf_counter_ns() - started) / 1e3
    return float(np.median(times))


def at_recall(recalls: list[float], values: list[float], wanted: float) -> float:
    """The value at a recall, between measured ones; NaN where it is not reached.

    Args:
        recalls: rising, below 1.
        values: one for each.
        wanted: the recall.
    """
    if max(recalls) < wanted:
        return float("nan")
    missed = [-np.log(1 - recall) for recall in recalls]
    return float(np.interp(-np.log(1 - wanted), missed, values))


def measure(vectors: np.ndarray, queries: np.ndarray, threads: int) -> dict[str, Any]:
    """Figures of one size."""
    started = time.monotonic()
    built = build_index(vectors, M, EF_CONSTRUCTION, threads)
    seconds = time.monotonic() - started
    index = BuiltIndex(built, vectors)
    del built
    judged, timed = queries[:_JUDGED], queries[_JUDGED : _JUDGED + _TIMED]
    kth = exact_topk(judged, vectors, K)[1][:, -1]
    recalls, times = [], []
    for number, ef in enumerate(_EFS):
        index.set_ef(ef)
        recalls.append(min(0.9999, recall_at_k(index.knn_query(judged, K)[0], judged, vectors, kth)))
        times.append(microseconds(index, timed[number :: len(_EFS)]))
        if recalls[-1] >= RECALL:
            break
    used = len(recalls)
    return {
        "build_seconds": seconds,
        "ef": at_recall(recalls, list(map(float, _EFS[:used])), RECALL),
        "microseconds": at_recall(recalls, times, RECALL),
        "bytes_a_phrase": sum(array.nbytes for array in index.graph) / len(vectors)
        + vectors.itemsize * vectors.shape[1],
    }


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(8000))
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(work: Path, phrases: int, as_json: bool) -> None:
    """Measure each size."""
    threads = len(os.sched_getaffinity(0))
    texts = queries_of(work, phrases)
    found: dict[str, Any] = {"threads": threads, "recall": RECALL}
    with open_bundle(bundle_of(work, minilm(phrases), texts)) as bundle:
        queries = QueryEncoder(bundle, threads).encode(texts[: _JUDGED + _TIMED]).narrow
        order = np.random.default_rng(0).permutation(phrases)
        for part in PARTS:
            count = phrases // part
            vectors = np.ascontiguousarray(bundle.vectors[np.sort(order[:count])])
            figures = measure(vectors, queries, threads)
            found |= {f"at_{count}_{name}": value for name, value in figures.items()}
            say(f"{count:,} phrases: " + ", ".join(f"{name} {value:,.1f}" for name, value in figures.items()))
    if as_json:
        emit_json(found)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
