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
from trainer.data.dataset import Interactions
from trainer.metrics import evaluate_ranking, most_filtered, propensities, without_filtered

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
        index: as it serves.
        threads: of the search.
    """
    texts, _ = texts_of(source)
    rows = sample_of(len(texts), len(labels.narrow))
    queries = encoder.encode([texts[row] for row in rows])

    def found(k: int) -> np.ndarray:
        depth = min(candidates.depth(k), len(labels.narrow))
        return search(index, labels.narrow, queries.narrow, depth, threads)

    def answered(k: int) -> np.ndarray:
        nearest = found(k)
        return nearest if labels.wide is None else by_wide_score(labels.wide, queries.wide, nearest)[0]

    a, b = source.propensity
    figures: dict[str, dict[str, float]] = {"exact": {}, "index": {}, "served": {}}
    judged = None
    if len(source.validation):
        asked = source.validation.take(rows)
        more = most_filtered(asked.filtered)
        exact = exact_search(
            queries.narrow, labels.narrow, 100 + more, "exact search for the quality figures"
        )
        rankings = {"exact": exact[0], "index": found(100 + more), "served": answered(100 + more)}
        figures = _figures(source, asked, rankings)
        top = without_filtered(answered(10 + more), asked.filtered, 10)
        judged = (
            figures["index"],
            {**figures["served"], **evaluate_ranking(top, asked.clicks, (1, 5), (10,))},
        )
    quality = Quality(
        queries=len(rows) if len(source.validation) else 0, propensity={"A": a, "B": b}, **figures
    )
    if labels.wide is None:
        return quality, None
    record = make_record(
        folder,
        labels.wide,
        queries.wide,
        found(1)[:, : candidates.count],
        candidates,
        judged,
        quality.queries,
    )
    return quality, record


def _figures(
    source: ExportSource, asked: Interactions, rankings: dict[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Metrics of the rankings of validation queries, said aloud."""
    # As in the run's report and in eval: frequencies count the validation queries, too.
    counts = source.train_clicks + np.bincount(
        source.validation.clicks.indices, minlength=len(source.train_clicks)
    )
    weights = propensities(counts, source.train_queries + len(source.validation), *source.propensity)
    figures = {}
    for name, ranking in rankings.items():
        ranking = without_filtered(ranking, asked.filtered, 100)
        found = evaluate_ranking(ranking, asked.clicks, propensity=weights)
        figures[name] = {key: round(float(value), 4) for key, value in found.items() if math.isfinite(value)}
        shown = ("P@1", "P@5", "PSP@5", "recall@10")
        say(
            f"{name}: "
            + ", ".join(f"{key} {figures[name][key]:.2f}" for key in shown if key in figures[name])
        )
    return figures
