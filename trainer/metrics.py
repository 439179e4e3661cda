"""Ranking measures of extreme classification: P@k, PSP@k, recall@k, nDCG@k, coverage@k. All in percent.

Notation: n queries, L labels; `topk` is the ranking, int64 (n, K), best first, -1 where there is nothing;
`truth` is a CSR matrix (n, L) whose non-zero entries are the relevant labels (their values do not matter: a
label is relevant or it is not). T_i is the set of labels relevant to query i, r_i(1), r_i(2), ... its
ranking, q_l = 1/p_l the inverse propensity of label l. k may exceed K: missing places count as misses, as
-1 does.

What is defined where a formula is not:

- a query with no relevant label adds 0 to P@k, recall@k and nDCG@k and is counted in n (as napkinXC's
  `zero_division=0`), and adds 0 to both sums of PSP@k;
- a measure of nothing (n = 0, or no relevant label at all for PSP@k and coverage@k, where napkinXC divides by
  zero) is NaN, never 0 and never an exception;
- a ranking has no label twice (not checked; one that has scores each occurrence).

Where data come with filter files, rankings are measured without the pairs these name: see `without_filtered`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp

HEAD_ABOVE = 100
TAIL_BELOW = 10


def precision_at_k(topk: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    """P@k = 100/n Σ_i 1/k Σ_{j<=k} [r_i(j) ∈ T_i]."""
    return _precision(hits(topk, truth, k), k)


def psp_at_k(topk: np.ndarray, truth: sp.csr_matrix, k: int, propensity: np.ndarray) -> float:
    """Propensity-scored precision, normalised by the best attainable.

    PSP@k = 100 · (Σ_i Σ_{j<=k} q_{r_i(j)} [r_i(j) ∈ T_i]) / (Σ_i sum of the k largest q_l, l ∈ T_i),

    one quotient of two sums over all queries, as the extreme classification repository's scripts and napkinXC
    have it, not the mean of a quotient per query.

    Args:
        topk: int64 (n, K).
        truth: (n, L).
        k: places that count.
        propensity: (L,) p_l in (0, 1], see `propensities`.
    """
    return _psp(topk, hits(topk, truth, k), truth, k, propensity)


def recall_at_k(topk: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    """recall@k = 100/n Σ_i |T_i ∩ {r_i(1..k)}| / |T_i|; divided by |T_i| even where |T_i| > k."""
    return _recall(hits(topk, truth, k), truth, k)


def ndcg_at_k(topk: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    """nDCG@k = 100/n Σ_i (Σ_{j<=k} [r_i(j) ∈ T_i] / log2(j+1)) / (Σ_{j<=min(k,|T_i|)} 1 / log2(j+1))."""
    return _ndcg(hits(topk, truth, k), truth, k)


def coverage_at_k(topk: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    """Of the labels relevant to any query, the share found in the first k of a query they are relevant to."""
    return _coverage(topk, hits(topk, truth, k), truth, k)


def propensities(label_counts: np.ndarray, n_train: int, a: float = 0.55, b: float = 1.5) -> np.ndarray:
    """How likely each label is to be in the log where it is relevant (Jain, Prabhu and Varma, KDD 2016).

    p_l = 1 / (1 + C (n_l + B)^-A), C = (ln N - 1)(B + 1)^A. C is taken as 0 (all propensities 1) for N < 3,
    where the formula gives values above 1, infinite or negative.

    Args:
        label_counts: (L,) n_l, number of training queries of each label.
        n_train: N, number of training queries.
        a: A, a constant of the data set; print it with every PSP@k.
        b: B, likewise.

    Returns:
        float64 (L,), in (0, 1].
    """
    c = max(np.log(max(n_train, 1)) - 1.0, 0.0) * (b + 1.0) ** a
    return 1.0 / (1.0 + c * (np.asarray(label_counts, dtype=np.float64) + b) ** -a)


def evaluate_ranking(
    topk: np.ndarray,
    truth: sp.csr_matrix,
    ks: Sequence[int] = (1, 3, 5),
    recall_ks: Sequence[int] = (10, 100),
    propensity: np.ndarray | None = None,
) -> dict[str, float]:
    """All measures of one ranking, in percent.

    Args:
        topk: int64 (n, K), -1 where there is nothing.
        truth: (n, L).
        ks: places of P@k, PSP@k and nDCG@k.
        recall_ks: places of recall@k and coverage@k.
        propensity: (L,) or None, which leaves PSP@k out.

    Returns:
        "P@1", "PSP@5", "nDCG@5", "recall@10", "coverage@10", ... -> percent.
    """
    hit = hits(topk, truth, max([*ks, *recall_ks], default=0))
    out = {f"P@{k}": _precision(hit, k) for k in ks}
    if propensity is not None:
        out |= {f"PSP@{k}": _psp(topk, hit, truth, k, propensity) for k in ks}
    out |= {f"nDCG@{k}": _ndcg(hit, truth, k) for k in ks}
    out |= {f"recall@{k}": _recall(hit, truth, k) for k in recall_ks}
    out |= {f"coverage@{k}": _coverage(topk, hit, truth, k) for k in recall_ks}
    return out


def by_frequency(
    topk: np.ndarray,
    truth: sp.csr_matrix,
    train_counts: np.ndarray,
    ks: Sequence[int] = (1, 3, 5),
    recall_ks: Sequence[int] = (10, 100),
    propensity: np.ndarray | None = None,
) -> dict[str, dict[str, float]]:
    """The measures on head (> 100 training queries), torso (10 to 100) and tail (< 10, unseen too) labels.

    In a bin, the truth is restricted to the bin's labels, the queries to those that have one, and the ranking
    stays the whole ranking that is served: a label of another bin keeps its place in it, right or wrong. So
    tail recall@10 is the share of a query's tail labels among the ten phrases it is answered with.

    Args:
        topk: int64 (n, K).
        truth: (n, L).
        train_counts: (L,) number of training queries of each label.
        ks: as in `evaluate_ranking`.
        recall_ks: as in `evaluate_ranking`.
        propensity: as in `evaluate_ranking`.

    Returns:
        "head" | "torso" | "tail" -> the measures of `evaluate_ranking` (NaN in a bin with no query) with
        "labels" (labels of the bin), "queries" (queries that have one) and "pairs" (relevant pairs).
    """
    counts = np.asarray(train_counts)
    bins = {
        "head": counts > HEAD_ABOVE,
        "torso": (counts >= TAIL_BELOW) & (counts <= HEAD_ABOVE),
        "tail": counts < TAIL_BELOW,
    }
    out: dict[str, dict[str, float]] = {}
    for name, inside in bins.items():
        part = _restrict(truth, inside)
        rows = np.flatnonzero(_sizes(part))
        out[name] = {"labels": int(inside.sum()), "queries": len(rows), "pairs": int(part.nnz)}
        out[name] |= evaluate_ranking(topk[rows], part[rows], ks, recall_ks, propensity)
    return out


def by_volume(
    topk: np.ndarray,
    truth: sp.csr_matrix,
    train_counts: np.ndarray,
    bins: int = 5,
    ks: Sequence[int] = (1, 3, 5),
    recall_ks: Sequence[int] = (10, 100),
    propensity: np.ndarray | None = None,
) -> list[dict[str, float]]:
    """What labels of falling frequency contribute to each measure; the contributions add up to the measure.

    Labels are ordered by training queries, most first (ties by index), and cut into bins of equal volume,
    that is of equal sums of training queries: the first bin holds few labels, the last one most of them and
    all unseen ones. A label with more than a bin's volume leaves a bin empty. A bin's contribution to P@k,
    PSP@k or recall@k counts only the hits on its labels and keeps the denominators of the whole.

    Args:
        topk: int64 (n, K).
        truth: (n, L).
        train_counts: (L,) number of training queries of each label.
        bins: number of bins.
        ks: places of P@k and PSP@k.
        recall_ks: places of recall@k.
        propensity: (L,) or None, which leaves PSP@k out.

    Returns:
        A dict per bin: "labels", "volume" (training queries), "most" and "fewest" (training queries of one
        label; 0 in an empty bin) and the contributions "P@1", "PSP@5", "recall@10", ... in percentage points.
    """
    counts = np.asarray(train_counts, dtype=np.int64)
    bin_of = _equal_volume(counts, bins)
    hit = hits(topk, truth, max([*ks, *recall_ks], default=0))
    ranked = np.where(topk < 0, 0, topk)[:, : hit.shape[1]]
    bin_of_place = bin_of[ranked] if len(counts) else np.zeros_like(ranked)
    out = []
    for b in range(bins):
        inside = counts[bin_of == b]
        row: dict[str, float] = {
            "labels": len(inside),
            "volume": int(inside.sum()),
            "most": int(inside.max(initial=0)),
            "fewest": int(inside.min()) if len(inside) else 0,
        }
        part = hit & (bin_of_place == b)
        row |= {f"P@{k}": _precision(part, k) for k in ks}
        if propensity is not None:
            row |= {f"PSP@{k}": _psp(topk, part, truth, k, propensity) for k in ks}
        row |= {f"recall@{k}": _recall(part, truth, k) for k in recall_ks}
        out.append(row)
    return out


def without_filtered(topk: np.ndarray, filtered: sp.csr_matrix | None, k: int) -> np.ndarray:
    """The first k of each ranking once the filtered pairs are taken out; those behind them move up.

    To leave k places filled, the ranking must be as deep as `most_filtered` + k.

    Args:
        topk: int64 (n, K), best first, -1 where there is nothing, which keeps its place.
        filtered: CSR (n, L), non-zero where a label is taken out of the query's ranking; None for no pair.
        k: places to return.

    Returns:
        int64 (n, min(k, K)), -1 where nothing moved up.

    Raises:
        ValueError: as `hits`.
    """
    if filtered is None or not filtered.nnz:
        return topk[:, :k]
    out = hits(topk, filtered)
    order = np.argsort(out, axis=1, kind="stable")[:, :k]
    return np.where(np.take_along_axis(out, order, axis=1), -1, np.take_along_axis(topk, order, axis=1))


def most_filtered(filtered: sp.csr_matrix | None) -> int:
    """Filtered labels of the query that has most of them; 0 for None."""
    return 0 if filtered is None else int(np.diff(filtered.indptr).max(initial=0))


def hits(topk: np.ndarray, truth: sp.csr_matrix, k: int | None = None) -> np.ndarray:
    """Which places of the ranking hold a relevant label: bool (n, min(k, K)), or (n, K) without k.

    Raises:
        ValueError: the shapes do not agree, k < 1, or a label is outside -1 .. L-1.
    """
    topk = np.asarray(topk)
    n, n_labels = truth.shape
    if topk.ndim != 2 or topk.shape[0] != n:
        raise ValueError(f"a ranking of shape {topk.shape} does not fit a truth of shape {truth.shape}")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    topk = topk[:, :k]
    if topk.size == 0:
        return np.zeros(topk.shape, dtype=bool)
    if topk.min() < -1 or topk.max() >= n_labels:
        raise ValueError(f"the ranking names a label outside 0 .. {n_labels - 1}")
    rows, labels = _pairs(truth)
    relevant = rows * n_labels + labels
    if not len(relevant):
        return np.zeros(topk.shape, dtype=bool)
    wanted = np.arange(n, dtype=np.int64)[:, None] * n_labels + topk
    place = np.minimum(np.searchsorted(relevant, wanted), len(relevant) - 1)
    return (relevant[place] == wanted) & (topk >= 0)


def _pairs(truth: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels of the relevant pairs, int64, sorted by both, each pair once."""
    n, n_labels = truth.shape
    rows = np.repeat(np.arange(n, dtype=np.int64), np.diff(truth.indptr))
    flat = np.unique((rows * n_labels + truth.indices)[truth.data != 0])
    return np.divmod(flat, max(n_labels, 1))


def _sizes(truth: sp.csr_matrix) -> np.ndarray:
    """|T_i|: int64 (n,)."""
    return np.bincount(_pairs(truth)[0], minlength=truth.shape[0])


def _mean(per_query: np.ndarray) -> float:
    return 100.0 * float(per_query.mean()) if len(per_query) else float("nan")


def _precision(hit: np.ndarray, k: int) -> float:
    return _mean(hit[:, :k].sum(axis=1) / k)


def _recall(hit: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    return _mean(hit[:, :k].sum(axis=1) / np.maximum(_sizes(truth), 1))


def _ndcg(hit: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    discount = 1.0 / np.log2(np.arange(2, k + 2))
    best = np.concatenate(
        [[1.0], np.cumsum(discount)]
    )  # no relevant label: the gain is 0, whatever it is over
    gain = hit[:, :k] @ discount[: min(k, hit.shape[1])]
    return _mean(gain / best[np.minimum(_sizes(truth), k)])


def _psp(topk: np.ndarray, hit: np.ndarray, truth: sp.csr_matrix, k: int, propensity: np.ndarray) -> float:
    inverse = 1.0 / np.asarray(propensity, dtype=np.float64)
    rows, places = np.nonzero(hit[:, :k])
    got = inverse[topk[rows, places]].sum()
    owners, labels = _pairs(truth)
    order = np.lexsort((-inverse[labels], owners))
    sizes = np.bincount(owners, minlength=truth.shape[0])
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    best = inverse[labels[order]][rank < k].sum()
    return 100.0 * float(got / best) if best > 0 else float("nan")


def _coverage(topk: np.ndarray, hit: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    relevant = len(np.unique(_pairs(truth)[1]))
    rows, places = np.nonzero(hit[:, :k])
    found = len(np.unique(topk[rows, places]))
    return 100.0 * found / relevant if relevant else float("nan")


def _restrict(truth: sp.csr_matrix, inside: np.ndarray) -> sp.csr_matrix:
    """`truth` without the labels where `inside` (bool (L,)) is false."""
    rows, labels = _pairs(truth)
    keep = inside[labels]
    ones = np.ones(int(keep.sum()), dtype=np.float32)
    return sp.csr_matrix((ones, (rows[keep], labels[keep])), shape=truth.shape)


def _equal_volume(counts: np.ndarray, bins: int) -> np.ndarray:
    """Bin of each label, int64 (L,): the bin that the middle of its share of the volume falls into."""
    order = np.argsort(-counts, kind="stable")
    sorted_counts = counts[order].astype(np.float64)
    middle = np.cumsum(sorted_counts) - sorted_counts / 2
    total = max(float(sorted_counts.sum()), 1.0)
    bin_of = np.empty(len(counts), dtype=np.int64)
    bin_of[order] = np.where(sorted_counts > 0, np.minimum(bins * middle / total, bins - 1), bins - 1)
    return bin_of
