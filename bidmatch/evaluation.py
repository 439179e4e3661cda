"""Measuring rankings on a data set: which queries count, which label a served phrase is, the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bidmatch.base.console import progress, say
from bidmatch.base.text import key
from trainer.data.dataset import Dataset, Interactions
from trainer.metrics import (
    by_frequency,
    by_volume,
    evaluate_ranking,
    most_filtered,
    propensities,
    without_filtered,
)

KS = (1, 3, 5)
RECALL_KS = (10, 100)
_QUERIES_PER_CALL = 64


class Quality(BaseModel):
    """Measures of one ranking, in percent; NaN (null in JSON) where there is nothing to measure.

    Attributes:
        metrics: over all queries, see `trainer.metrics.evaluate_ranking`.
        by_frequency: of head, torso and tail phrases, see `trainer.metrics.by_frequency`.
        by_volume: contributions of bins of equal volume, see `trainer.metrics.by_volume`.
    """

    metrics: dict[str, float]
    by_frequency: dict[str, dict[str, float]]
    by_volume: list[dict[str, float]]


@dataclass(frozen=True)
class Popularity:
    """What is known about the training log, for propensities and for head, torso and tail.

    Attributes:
        counts: int64 (L,): training queries of each phrase of the data.
        n_train: training queries.
        a: A of the propensity.
        b: B of the propensity.
    """

    counts: np.ndarray
    n_train: int
    a: float = 0.55
    b: float = 1.5


def query_counts(train: Interactions) -> np.ndarray:
    """Number of queries of each phrase, int64 (L,)."""
    return np.bincount(train.clicks.indices, minlength=train.clicks.shape[1])


def measure(topk: np.ndarray, truth: sp.csr_matrix, popularity: Popularity) -> Quality:
    """All measures of a ranking.

    Args:
        topk: int64 (n, K), best first, -1 for a place without a phrase of the data.
        truth: (n, L).
        popularity: of the L phrases in training.
    """
    propensity = propensities(popularity.counts, popularity.n_train, popularity.a, popularity.b)
    return Quality(
        metrics=evaluate_ranking(topk, truth, KS, RECALL_KS, propensity),
        by_frequency=by_frequency(topk, truth, popularity.counts, KS, RECALL_KS, propensity),
        by_volume=by_volume(topk, truth, popularity.counts, 5, KS, RECALL_KS, propensity),
    )


def measure_lexical(dataset: Dataset, depth: int, popularity: Popularity) -> dict[str, Quality]:
    """The lexical baselines of `trainer.baselines`, fitted on the training part, on the held-out part.

    Returns:
        "tfidf" | "nearest" | "hybrid" -> measures.
    """
    from trainer.baselines import fit_lexical

    say("fitting the lexical baselines")
    labels = [key(text) for text in dataset.phrases["text"].to_pylist()]
    matcher = fit_lexical(dataset.train.queries.to_pylist(), labels, dataset.train.clicks)
    filtered = dataset.filtered
    rankings = matcher.rank(dataset.test.queries.to_pylist(), depth + most_filtered(filtered))
    return {
        name: measure(without_filtered(topk, filtered, depth), dataset.test.clicks, popularity)
        for name, topk in rankings.items()
    }


def rows_in(phrases: pa.Table, of: pa.Table) -> np.ndarray:
    """Row in `of` of each phrase of `phrases`, int64, -1 where it is not there.

    Phrases are the same when their keys are, and their match types where both tables have them.
    """
    by_match_type = "match_type" in phrases.column_names and "match_type" in of.column_names
    found = pc.index_in(_identities(phrases, by_match_type), value_set=_identities(of, by_match_type))
    return pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)


def _identities(phrases: pa.Table, by_match_type: bool) -> pa.Array:
    keys = [key(text) for text in phrases["text"].to_pylist()]
    if by_match_type:
        matches = phrases["match_type"].to_pylist()
        keys = [f"{one}\x1f{match or ''}" for one, match in zip(keys, matches, strict=True)]
    return pa.array(keys, pa.large_string())


def rank_all(
    queries: Sequence[str],
    match: Callable[[list[str], int], tuple[np.ndarray, np.ndarray]],
    label_of: np.ndarray,
    k: int,
    threads: int,
    filtered: sp.csr_matrix | None = None,
) -> np.ndarray:
    """Rank labels of the data for all queries.

    Args:
        queries: n texts.
        match: queries and how many phrases to find for each, to (offsets (m + 1), rows): the served phrases
            of query i, best first, are `rows[offsets[i]:offsets[i + 1]]`; called from several threads.
        label_of: int64: label of each served phrase, -1 for none.
        k: depth of the ranking.
        threads: calls at once.
        filtered: CSR (n, L) of pairs to take out; as many more phrases are asked for as that takes.

    Returns:
        int64 (n, k), -1 where there is no phrase, or none of the data, or one that came before.
    """
    blocks = range(0, len(queries), _QUERIES_PER_CALL)

    def rank(start: int) -> np.ndarray:
        block = slice(start, start + _QUERIES_PER_CALL)
        out = None if filtered is None else filtered[block]
        depth = k + most_filtered(out)
        offsets, rows = match(list(queries[block]), depth)
        return without_filtered(dense_ranking(offsets, rows, label_of, depth), out, k)

    out = [np.empty((0, k), np.int64)]
    with progress("matching", len(queries), "queries") as step, ThreadPoolExecutor(threads) as pool:
        for ranked in pool.map(rank, blocks):
            out.append(ranked)
            step.advance(len(ranked))
    return np.concatenate(out)


def dense_ranking(offsets: np.ndarray, rows: np.ndarray, label_of: np.ndarray, k: int) -> np.ndarray:
    """Columnar matches as a ranking of labels, see `rank_all`."""
    n = len(offsets) - 1
    out = np.full((n, k), -1, dtype=np.int64)
    sizes = np.diff(offsets)
    query = np.repeat(np.arange(n), sizes)
    place = np.arange(len(rows)) - np.repeat(offsets[:-1], sizes)
    labels = label_of[rows]
    # Two served phrases can be one phrase of the data, which has its match types merged.
    _, first = np.unique(query * (len(label_of) + labels.max(initial=0) + 2) + labels, return_index=True)
    keep = np.zeros(len(rows), dtype=bool)
    keep[first] = True
    keep &= (place < k) & (labels >= 0)
    out[query[keep], place[keep]] = labels[keep]
    return out


def quality_table(title: str, quality: Quality) -> Table:
    """The measures as a table: all queries, then head, torso, tail."""
    names = [f"{measure}@{k}" for measure in ("P", "PSP") for k in KS] + [f"recall@{k}" for k in RECALL_KS]
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("queries", justify="right")
    table.add_column("phrases", justify="right")
    table.add_row("all", *(_percent(quality.metrics, name) for name in names), "", "")
    for bin_name, values in quality.by_frequency.items():
        figures = (_percent(values, name) for name in names)
        table.add_row(bin_name, *figures, f"{values['queries']:,.0f}", f"{values['labels']:,.0f}")
    return table


def print_tables(tables: Sequence[Table]) -> None:
    """Print to stdout; where that is no terminal, as wide as a table needs."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    for table in tables:
        console.print(table)


def _percent(values: dict[str, float], name: str) -> str:
    value = values.get(name, float("nan"))
    return "-" if np.isnan(value) else f"{value:.1f}"
