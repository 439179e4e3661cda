"""Scores to probabilities: isotonic regression of clicks on what is served to validation queries.

The log says which phrases were clicked, not which were not: a phrase that suits a query and was never shown
for it counts as not clicked. The relevance is therefore that of the log, and low where the log is thin; what
it is good for is one threshold with the same meaning for every bundle.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.isotonic import IsotonicRegression

from bidmatch.base.console import say
from export.bundle.encoder import TextEncoder
from export.bundle.relevance import MAX_KNOTS, CalibrationRecord, ReliabilityBin
from export.hnsw import search
from export.rescoring import by_wide_score
from export.vectors import LabelVectors
from trainer.data.dataset import Interactions
from trainer.metrics import hits

DEPTH = 100
LEAST_QUERIES = 50
LEAST_CLICKED = 20
# A step of the curve stands on as many pairs: of fewer, a share says next to nothing.
LEAST_PAIRS = 20
_BINS = 10
_BLOCK = 256


def fit_curve(scores: np.ndarray, clicked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots of a rising curve from score to the share of clicked pairs.

    Isotonic regression gives steps; steps of few pairs join a neighbour, then others, cheapest in squared
    error first, until there are at most 64. A step's knot is its mean score and share, and between knots the
    curve runs straight (centred isotonic regression): no two scores in between share a relevance.

    Args:
        scores: (m,), finite, m >= 1.
        clicked: bool (m,).

    Returns:
        Scores and relevances of the knots, float64 (<= 64,) each, both strictly rising.
    """
    scores = np.asarray(scores, dtype=np.float64)
    order = np.argsort(scores, kind="stable")
    scores, clicked = scores[order], np.asarray(clicked, dtype=np.float64)[order]
    fitted = IsotonicRegression(y_min=0.0, y_max=1.0).fit_transform(scores, clicked)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(fitted) > 0]))
    sizes = np.diff(np.append(starts, len(scores))).astype(np.float64)
    steps = [
        list(step)
        for step in zip(
            sizes,
            np.add.reduceat(scores, starts) / sizes,
            np.add.reduceat(clicked, starts) / sizes,
            strict=True,
        )
    ]
    steps = _joined(steps)
    knots = np.array(steps)[:, 1:]
    # Steps whose means rounding has made equal would not rise.
    keep = np.concatenate([[True], (np.diff(knots, axis=0) > 0).all(axis=1)])
    return knots[keep, 0], np.clip(knots[keep, 1], 0.0, 1.0)


def _joined(steps: list[list[float]]) -> list[list[float]]:
    """Steps (pairs, mean score, share) joined with neighbours; a join lies between the two, so all rise."""

    def cost(left: list[float], right: list[float]) -> float:
        weight = left[0] * right[0] / (left[0] + right[0])
        return weight * (left[2] - right[2]) ** 2

    while len(steps) > 1:
        costs = [cost(*pair) for pair in pairwise(steps)]
        small = [
            place for place in range(len(costs)) if min(steps[place][0], steps[place + 1][0]) < LEAST_PAIRS
        ]
        if not small and len(steps) <= MAX_KNOTS:
            break
        at = min(small or range(len(costs)), key=lambda place: costs[place])
        left, right = steps[at], steps[at + 1]
        pairs = left[0] + right[0]
        means = [(left[0] * left[i] + right[0] * right[i]) / pairs for i in (1, 2)]
        steps = [*steps[:at], [pairs, *means], *steps[at + 2 :]]
    return steps


def cross_fitted(scores: np.ndarray, clicked: np.ndarray, half: np.ndarray) -> np.ndarray:
    """The relevance of each pair by a curve that its query had no part in, float64 (m,).

    Args:
        scores: (m,).
        clicked: bool (m,).
        half: bool (m,), which half of the queries the pair's query is in; both are there.
    """
    predicted = np.empty(len(scores))
    for inside in (half, ~half):
        predicted[inside] = np.interp(scores[inside], *fit_curve(scores[~inside], clicked[~inside]))
    return predicted


def reliability(predicted: np.ndarray, clicked: np.ndarray) -> tuple[float, list[ReliabilityBin]]:
    """Expected calibration error, and the ten bins of equal width that it sums over.

    Args:
        predicted: (m,), in 0..1, m >= 1.
        clicked: bool (m,).
    """
    place = np.minimum((predicted * _BINS).astype(np.int64), _BINS - 1)
    counts = np.bincount(place, minlength=_BINS)
    whole = np.maximum(counts, 1)
    means = np.bincount(place, predicted, _BINS) / whole
    shares = np.bincount(place, clicked, _BINS) / whole
    ece = float((counts * np.abs(means - shares)).sum() / len(predicted))
    bins = [
        ReliabilityBin(
            low=at / _BINS,
            high=(at + 1) / _BINS,
            pairs=int(counts[at]),
            predicted=round(float(means[at]), 6),
            clicked=round(float(shares[at]), 6),
        )
        for at in range(_BINS)
    ]
    return ece, bins


def calibration_for(
    validation: Interactions,
    encoder: TextEncoder,
    labels: LabelVectors,
    depth: int,
    index: Any,
    threads: int,
) -> CalibrationRecord | None:
    """The curve of what the bundle answers to these queries when 100 phrases are asked for.

    Args:
        validation: queries and their labels; few are enough for none.
        encoder: the one that serves.
        labels: weighted, as they are in the bundle.
        depth: phrases that are searched for when 100 are asked for, and re-scored where the bundle does that.
        index: as it serves.
        threads: of the search.
    """
    if len(validation) < LEAST_QUERIES:
        say(f"no calibration: {len(validation)} validation queries, at least {LEAST_QUERIES} are needed")
        return None
    queries = encoder.encode(validation.queries.to_pylist())
    rows = search(index, labels.narrow, queries.narrow, min(depth, len(labels.narrow)), threads)
    if labels.wide is not None:
        rows, scores = by_wide_score(labels.wide, queries.wide, rows)
    else:
        scores = np.empty(rows.shape, dtype=np.float32)
        for start in range(0, len(rows), _BLOCK):
            part = slice(start, start + _BLOCK)
            scores[part] = np.einsum("nd,ncd->nc", queries.narrow[part], labels.narrow[rows[part]])
    return calibrate(rows, scores, validation.clicks, validation.filtered)


def calibrate(
    rows: np.ndarray, scores: np.ndarray, truth: sp.csr_matrix, filtered: sp.csr_matrix | None = None
) -> CalibrationRecord | None:
    """The curve of what is served to validation queries, and how far it can be trusted, said aloud.

    Args:
        rows: int64 (n, K), the phrases that are answered, best first.
        scores: float32 (n, K), with these scores.
        truth: (n, L).
        filtered: (n, L), pairs that say nothing; None for none.

    Returns:
        None where there are fewer than 50 queries, or fewer than 20 answered phrases that were clicked, or
        that were not: too little to tell a share by.
    """
    rows = rows[:, :DEPTH]
    if len(rows) < LEAST_QUERIES:
        return None
    counts = np.ones(rows.shape, bool) if filtered is None else ~hits(rows, filtered)
    clicked, pairs = hits(rows, truth)[counts], scores[:, :DEPTH][counts].astype(np.float64)
    if min(int(clicked.sum()), int((~clicked).sum())) < LEAST_CLICKED:
        say(
            f"no calibration: of {clicked.size:,} answered phrases {int(clicked.sum()):,} were clicked; "
            f"at least {LEAST_CLICKED} of either kind are needed"
        )
        return None
    half = np.zeros(len(rows), dtype=bool)
    half[np.random.default_rng(2).permutation(len(rows))[: len(rows) // 2]] = True
    predicted = cross_fitted(pairs, clicked, np.broadcast_to(half[:, None], rows.shape)[counts])
    ece, bins = reliability(predicted, clicked)
    knots, relevance = fit_curve(pairs, clicked)
    share = float(clicked.mean())
    record = CalibrationRecord(
        scores=knots.tolist(),
        relevance=relevance.tolist(),
        depth=rows.shape[1],
        queries=len(rows),
        pairs=len(clicked),
        clicked=int(clicked.sum()),
        brier=round(float(((predicted - clicked) ** 2).mean()), 6),
        brier_constant=round(share * (1 - share), 6),
        ece=round(ece, 6),
        bins=bins,
    )
    say(
        f"calibrated on {record.pairs:,} answered phrases of {record.queries:,} validation queries, "
        f"{record.clicked:,} clicked: Brier {record.brier:.4f} (constant {record.brier_constant:.4f}), "
        f"ECE {record.ece:.4f}, cross-fitted"
    )
    return record
