"""The weights of a vector's halves, chosen on validation queries and folded into the phrases' vectors.

A query is worth P@1 + P@5 + recall@10 of its answer. Of the weights w_D in `GRID`, those whose mean is behind
the best one's by no more than the standard error of that difference (paired: the same queries are asked of
both) do equally well as far as these queries can tell, and the one nearest to 1:1 is taken: the best of many
tried on few queries is partly luck. With re-scoring, the narrow weights are chosen by the narrow ranking, and
then the wide ones by the order of what the narrow vectors find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from bidmatch.base.console import say
from export.bundle.encoder import QueryVectors, TextEncoder
from export.bundle.read import WideVectors
from export.bundle.rescore import Rescorer
from export.bundle.weights import EVEN, BlendRecord, HalfWeights, WeightPoint
from export.exact import exact_search
from export.vectors import LabelVectors
from trainer.data.dataset import Interactions
from trainer.metrics import hits, most_filtered, without_filtered

GRID = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
LEAST_QUERIES = 50
_DEPTH = 10
_CANDIDATES = 100
# A difference that equals its standard error is within it, whatever the last bit says.
_EXACT = 1 + 1e-9
# Scores computed exactly for the choice, over the whole grid: 500 queries over a million phrases and more.
_SCORE_BUDGET = 4_000_000_000
_LEAST_SAMPLED = 500
_BLOCK = 65_536

# Rows of the best phrases, int64 (n, >= 10 where there are as many), for a weight w_D.
Ranking = Callable[[float], np.ndarray]


def worth(rows: np.ndarray, truth: sp.csr_matrix) -> np.ndarray:
    """P@1 + P@5 + recall@10 of each query's answer, each in percent.

    Args:
        rows: int64 (n, K), best first.
        truth: (n, L).

    Returns:
        float64 (n,), in 0..300.
    """
    found = hits(rows, truth, _DEPTH).astype(np.float64)
    relevant = np.maximum(np.diff(truth.indptr), 1)
    return 100.0 * (found[:, 0] + found[:, :5].sum(1) / 5 + found.sum(1) / relevant)


def choose_weight(ranking: Ranking, truth: sp.csr_matrix, grid: Sequence[float] = GRID) -> HalfWeights:
    """The weight of the Φ_D half on these queries; see the module.

    Args:
        ranking: what is answered under a weight.
        truth: (n, L), n >= 2.
        grid: weights to try, 1.0 among them.
    """
    values = {weight: worth(ranking(weight), truth) for weight in grid}
    even = values[1.0]
    points = []
    for weight, value in values.items():
        gain, error = _paired(value, even)
        points.append(
            WeightPoint(
                encoder=weight,
                value=round(float(value.mean()), 4),
                gain=round(gain, 4),
                error=round(error, 4),
            )
        )
    best = max(grid, key=lambda weight: (values[weight].mean(), -abs(weight - 1.0)))
    lost = {other: _paired(values[best], value) for other, value in values.items()}
    near = [other for other, (points_lost, error) in lost.items() if points_lost <= error * _EXACT]
    weight = min(near, key=lambda other: (abs(other - 1.0), lost[other]))
    behind, error = lost[weight]
    if weight != best:
        reason = f"{best:g} is {behind:.2f} points ahead, within its standard error {error:.2f}"
    elif weight == 1.0:
        reason = "no other weight has a higher P@1 + P@5 + recall@10"
    else:
        reason = "no weight nearer to 1:1 is within one standard error of it"
    if weight != 1.0:
        gain, error = _paired(values[weight], even)
        reason = f"gains {gain:.2f} points of P@1 + P@5 + recall@10, standard error {error:.2f}; {reason}"
    return HalfWeights(encoder=weight, queries=len(even), curve=points, reason=reason)


def _paired(value: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """How much more the queries are worth on average than under another weight, and its standard error."""
    gains = value - other
    return float(gains.mean()), float(gains.std(ddof=1)) / len(gains) ** 0.5


def blend(
    labels: LabelVectors,
    encoder_dim: int,
    validation: Interactions,
    encoder: TextEncoder,
    asked: float | None,
) -> tuple[LabelVectors, BlendRecord | None]:
    """Choose the weights and fold them into the phrases' vectors, in place.

    Args:
        labels: unweighted; their arrays hold weighted ones afterwards.
        encoder_dim: width of the narrow vectors' Φ_D half.
        validation: queries to choose on.
        encoder: in fp32.
        asked: w_D, or None to choose.

    Returns:
        The weighted vectors, and what the manifest says of them; as they are, and None, for a model of one
        head, which has no halves.
    """
    if not 0 < encoder_dim < labels.narrow.shape[1]:
        return labels, None
    rows = _sampled(len(validation), len(labels.narrow))
    if asked is not None or len(rows) < LEAST_QUERIES:
        usual = f"there are fewer than {LEAST_QUERIES} validation queries to choose on"
        given = HalfWeights(
            encoder=1.0 if asked is None else asked,
            queries=0,
            curve=[],
            reason=usual if asked is None else "as asked for",
        )
        record = BlendRecord(narrow=given, wide=None if labels.wide is None else given)
        _fold(labels, encoder_dim, given.pair)
        labels = _fold_wide(labels, given.pair)
    else:
        labels, record = _choose(labels, encoder_dim, validation.take(rows), encoder)
    for name, weights in (("half weights", record.narrow), ("wide half weights", record.wide)):
        if weights is not None:
            say(f"{name} {weights.pair[0]:g} : {weights.pair[1]:g}: {weights.reason}")
    return labels, record


def _choose(
    labels: LabelVectors, encoder_dim: int, validation: Interactions, encoder: TextEncoder
) -> tuple[LabelVectors, BlendRecord]:
    queries = encoder.encode(validation.queries.to_pylist())
    narrow = choose_weight(_searched(queries, labels, encoder_dim, validation.filtered), validation.clicks)
    _fold(labels, encoder_dim, narrow.pair)
    if labels.wide is None:
        return labels, BlendRecord(narrow=narrow, wide=None)
    ranking = _rescored(queries, labels, labels.wide, validation.filtered)
    wide = choose_weight(ranking, validation.clicks)
    return _fold_wide(labels, wide.pair), BlendRecord(narrow=narrow, wide=wide)


def _searched(
    queries: QueryVectors, labels: LabelVectors, encoder_dim: int, filtered: sp.csr_matrix | None
) -> Ranking:
    depth = _DEPTH + most_filtered(filtered)

    def ranking(weight: float) -> np.ndarray:
        # Weights in the query's vector give the same inner products as weights in the phrases'.
        weighted = queries.narrow.copy()
        weighted[:, :encoder_dim] *= weight
        weighted[:, encoder_dim:] *= 2.0 - weight
        found, _ = exact_search(weighted, labels.narrow, depth, f"exact search at half weight {weight:g}")
        return without_filtered(found, filtered, _DEPTH)

    return ranking


def _rescored(
    queries: QueryVectors, labels: LabelVectors, wide: WideVectors, filtered: sp.csr_matrix | None
) -> Ranking:
    candidates, _ = exact_search(
        queries.narrow, labels.narrow, _CANDIDATES, "exact search for the wide half weight"
    )
    encoder, classifier = Rescorer(wide).score(queries.wide, candidates)

    def ranking(weight: float) -> np.ndarray:
        scores = weight * encoder + (2.0 - weight) * classifier
        order = np.lexsort((candidates, -scores), axis=1)
        return without_filtered(np.take_along_axis(candidates, order, axis=1), filtered, _DEPTH)

    return ranking


def _fold(labels: LabelVectors, encoder_dim: int, pair: tuple[float, float]) -> None:
    if pair == EVEN:
        return
    for start in range(0, len(labels.narrow), _BLOCK):
        block = labels.narrow[start : start + _BLOCK]
        block[:, :encoder_dim] *= pair[0]
        block[:, encoder_dim:] *= pair[1]


def _fold_wide(labels: LabelVectors, pair: tuple[float, float]) -> LabelVectors:
    """A value is a whole number times its half's scale, so scaling the scales loses nothing."""
    if labels.wide is None:
        return labels
    labels.wide.scales[:] *= np.asarray(pair, dtype=np.float32)
    return replace(labels, wide=replace(labels.wide, weights=pair))


def _sampled(available: int, labels: int) -> np.ndarray:
    """Rows of the queries to choose on: all, unless exact search over the whole grid took too long."""
    count = min(available, max(_LEAST_SAMPLED, _SCORE_BUDGET // (labels * len(GRID))))
    return np.sort(np.random.default_rng(1).permutation(available)[:count])
