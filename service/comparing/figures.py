"""What a comparison comes to, in memory that does not grow with the log."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel

from service.comparing.answers import Pair

BANDS = ("0", "(0,25]", "(25,50]", "(50,75]", "(75,100)", "100")
"""Percent of A's matches that are also B's: classes of queries."""

_QUANTILES = (5, 25, 50, 75, 95)
_MOST_SHIFT = 4  # scores are in -2 to 2
_BINS_PER_UNIT = 1000
_BINS = 2 * _MOST_SHIFT * _BINS_PER_UNIT + 1


class Figures(BaseModel):
    """What a comparison comes to under one weighting of the queries.

    Attributes:
        queries: their weight.
        coverage_a: percent of them with a match in A; `coverage_b` likewise.
        matches_a: matches a query in A; `matches_b` likewise.
        gained: weight of queries with matches in B alone; `lost`: in A alone.
        overlap: percent of A's matches that are also B's, mean over queries with a match in A; None: no such.
        overlap_bands: weight of queries with a match in A by that percent: "0", "(0,25]", "(25,50]",
            "(50,75]", "(75,100)", "100".
        same_first: percent with the same first match, of queries with a match in both; None: no such.
        score_shift: mean of B's score less A's over common pairs of query and phrase; None: no such, or the
            scores are not comparable.
        score_shift_quantiles: of the same, `p5`, `p25`, `p50`, `p75`, `p95`, to 0.001; None likewise.
        relevance_a: mean relevance of A's matches; None: it has none, or no calibration.
        relevance_b: likewise of B's.
        relevance_shift: mean of B's relevance less A's over common pairs; None: no such, or one is not known.
    """

    queries: int
    coverage_a: float
    coverage_b: float
    matches_a: float
    matches_b: float
    gained: int
    lost: int
    overlap: float | None
    overlap_bands: dict[str, int]
    same_first: float | None
    score_shift: float | None
    score_shift_quantiles: dict[str, float] | None
    relevance_a: float | None
    relevance_b: float | None
    relevance_shift: float | None


class Sums:
    """Sums over queries under two weightings: each query once, and as often as the log has it. They add up.

    Args:
        pair: the answers to n queries.
        counts: int64 (n,), how often the log has each query.
    """

    def __init__(self, pair: Pair, counts: np.ndarray):
        n = len(counts)
        a, b = pair.a, pair.b
        owner = a.rows[pair.at_a]
        shifts = b.scores[pair.at_b] - a.scores[pair.at_a]
        closer = b.relevance[pair.at_b] - a.relevance[pair.at_a]
        has_a, has_b = pair.many_a > 0, pair.many_b > 0
        weights = np.stack([np.ones(n), counts])
        columns = [
            np.ones(n),
            has_a,
            has_b,
            has_a & has_b,
            pair.many_a,
            pair.many_b,
            pair.common,
            pair.common / np.maximum(pair.many_a, 1),
            pair.same_first,
            np.bincount(owner, shifts, minlength=n),
            np.bincount(a.rows, a.relevance, minlength=n),
            np.bincount(b.rows, b.relevance, minlength=n),
            np.bincount(owner, closer, minlength=n),
        ]
        self._columns = weights @ np.stack(columns, axis=1)
        self._bands = _by_class(_bands(pair)[has_a], weights[:, has_a], len(BANDS))
        known = np.isfinite(shifts)
        places = np.rint((np.clip(shifts[known], -_MOST_SHIFT, _MOST_SHIFT) + _MOST_SHIFT) * _BINS_PER_UNIT)
        self._shifts = _by_class(places.astype(np.int64), weights[:, owner[known]], _BINS)

    def add(self, more: Sums) -> None:
        """Count other queries in."""
        self._columns += more._columns
        self._bands += more._bands
        self._shifts += more._shifts

    @property
    def once(self) -> Figures:
        """With each distinct query once."""
        return self._figures(0)

    @property
    def traffic(self) -> Figures:
        """With each query as often as the log has it."""
        return self._figures(1)

    def _figures(self, at: int) -> Figures:
        total, has_a, has_b, both, many_a, many_b, common, overlap, first, shift, *relevance = self._columns[
            at
        ].tolist()
        return Figures(
            queries=round(total),
            coverage_a=_share(100 * has_a, total) or 0.0,
            coverage_b=_share(100 * has_b, total) or 0.0,
            matches_a=_share(many_a, total) or 0.0,
            matches_b=_share(many_b, total) or 0.0,
            gained=round(has_b - both),
            lost=round(has_a - both),
            overlap=_share(100 * overlap, has_a),
            overlap_bands=dict(zip(BANDS, map(round, self._bands[at].tolist()), strict=True)),
            same_first=_share(100 * first, both),
            score_shift=_share(shift, common),
            score_shift_quantiles=_quantiles(self._shifts[at]),
            relevance_a=_share(relevance[0], many_a),
            relevance_b=_share(relevance[1], many_b),
            relevance_shift=_share(relevance[2], common),
        )


def _bands(pair: Pair) -> np.ndarray:
    """The index in BANDS of each query."""
    quarters = -(-4 * pair.common // np.maximum(pair.many_a, 1))
    return np.where(pair.common == pair.many_a, len(BANDS) - 1, quarters)


def _by_class(classes: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    # Of nothing, bincount gives whole numbers.
    return np.stack([np.bincount(classes, row, minlength=count) for row in weights]).astype(np.float64)


def _quantiles(counts: np.ndarray) -> dict[str, float] | None:
    total = counts.sum()
    if not total:
        return None
    places = np.searchsorted(np.cumsum(counts), [np.ceil(q * total / 100) for q in _QUANTILES])
    return {
        f"p{q}": round(int(place) / _BINS_PER_UNIT - _MOST_SHIFT, 3)
        for q, place in zip(_QUANTILES, places, strict=True)
    }


def _share(part: float, whole: float) -> float | None:
    # NaN stands for what is not known.
    return None if not whole or np.isnan(part) else round(part / whole, 4)
