"""Quality of the bundle on held-out queries, and which queries its choices are made on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from bidmatch.base.console import say
from export.bundle.encoder import TextEncoder
from export.bundle.format import Quality, RescoreRecord
from export.exact import exact_search
from export.hnsw import search
from export.rescoring import Candidates, by_wide_score, make_record
from export.source import ExportSource
from export.vectors import LabelVectors
from trainer.metrics import evaluate_ranking, propensities

_PHRASE_QUERIES = 1_000
# Scores computed exactly for a choice: 1,000 queries over ten million phrases.
_SCORE_BUDGET = 10_000_000_000
_LEAST_QUERIES = 500


def sample_of(available: int, labels: int) -> np.ndarray:
    """Rows of the queries that choices are made on: all, unless exact search over them took too long."""
    count = min(available, max(_LEAST_QUERIES, _SCORE_BUDGET // labels))
    return np.sort(np.random.default_rng(0).permutation(available)[:count])


def texts_of(source: ExportSource) -> tuple[list[str], str]:
    """Texts to measure with: validation queries, or phrases where there are none."""
    if len(source.validation):
        return source.validation.queries.to_pylist(), "validation queries"
    rows = np.random.default_rng(0).permutation(source.phrases.num_rows)[:_PHRASE_QUERIES]
    return source.phrases["text"].take(np.sort(rows)).to_pylist(), "phrases"


def measure(
    folder: Path,
    source: ExportSource,
    encoder: TextEncoder,
    labels: LabelVectors,
    candidates: Candidates,
    index: Any,
    threads: int,
) -> tuple[Quality, RescoreRecord | None]:
    """Quality on validation queries, and what re-scoring has of it and costs.

    Args:
        folder: with the bundle's files in it.
        source: what is exported.
        encoder: the one that serves.
        labels: label vectors.
        candidates: how many of them are re-scored.
        index: hnswlib's, as it serves.
        threads: of the search.
    """
    texts, _ = texts_of(source)
    rows = sample_of(len(texts), len(labels.narrow))
    queries = encoder.encode([texts[row] for row in rows])
    k = min(100, len(labels.narrow))
    found = search(index, labels.narrow, queries.narrow, max(k, candidates.count), threads)
    rankings = {"index": found[:, :k], "served": found[:, :k]}
    if labels.wide is not None:  # all that a request for k re-scores
        rankings["served"] = by_wide_score(labels.wide, queries.wide, found)[0][:, :k]
    a, b = source.propensity
    figures: dict[str, dict[str, float]] = {"exact": {}, "index": {}, "served": {}}
    if len(source.validation):
        exact = exact_search(queries.narrow, labels.narrow, k, "exact search for the quality figures")[0]
        figures = _figures(source, rows, {"exact": exact, **rankings})
    quality = Quality(
        queries=len(rows) if len(source.validation) else 0, propensity={"A": a, "B": b}, **figures
    )
    if labels.wide is None:
        return quality, None
    return quality, make_record(folder, labels.wide, queries.wide, found, candidates, quality)


def _figures(
    source: ExportSource, rows: np.ndarray, rankings: dict[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Metrics of rankings of the validation queries `rows`, said aloud."""
    # As in the run's report and in eval: frequencies count the validation queries, too.
    counts = source.train_clicks + np.bincount(
        source.validation.clicks.indices, minlength=len(source.train_clicks)
    )
    weights = propensities(counts, source.train_queries + len(source.validation), *source.propensity)
    truth = source.validation.take(rows).clicks
    figures = {}
    for name, ranking in rankings.items():
        found = evaluate_ranking(ranking, truth, propensity=weights)
        figures[name] = {key: round(float(value), 4) for key, value in found.items() if math.isfinite(value)}
        shown = ("P@1", "P@5", "PSP@5", "recall@10")
        say(
            f"{name}: "
            + ", ".join(f"{key} {figures[name][key]:.2f}" for key in shown if key in figures[name])
        )
    return figures
