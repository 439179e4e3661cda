"""Pick-some-labels: the label pool of a batch and its positives (section 2.3.1 and Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

# Positives looked at in one go, so that memory does not grow with how many a query has.
_PAIRS_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class LabelPool:
    """What a batch's losses are computed on.

    Attributes:
        labels: L_B, int64 (m,), distinct, ascending.
        positives: P^B, float32 (n, m): the target of each pair of the training set (1 in a click log),
            whether the label came in as this query's sampled positive, another query's, or a hard negative;
            0 elsewhere.
    """

    labels: np.ndarray
    positives: np.ndarray


def sample_in_rows(valid: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """At most `count` of each row's true places in bool (n, t), uniformly without replacement."""
    keys = np.where(valid, rng.random(valid.shape), 2.0)
    if count < valid.shape[1]:
        limit = np.partition(keys, count - 1, axis=1)[:, count - 1 : count]
        return valid & (keys <= limit)
    return valid


def sample_places(sizes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """At most `count` of each row's places 0 to size - 1, uniformly without replacement (Floyd's algorithm).

    Its cost depends on `count`, not on the sizes.

    Args:
        sizes: int64 (n,).
        count: how many; all of a row that has no more.
        rng: the source of the sample.

    Returns:
        int64 (n, at most count), -1 where a row has fewer.
    """
    # All of a row's places, where that is asked for, cost by their number and not by what was asked.
    if count >= (longest := int(sizes.max(initial=0))):
        steps = np.arange(longest)
        return np.where(steps < sizes[:, None], steps, -1)
    places = np.full((len(sizes), count), -1, dtype=np.int64)
    for turn in range(count):
        last = sizes - count + turn
        drawn = rng.integers(0, np.maximum(last, 0) + 1)
        taken = (places[:, :turn] == drawn[:, None]).any(axis=1)
        few = np.where(turn < sizes, turn, -1)
        places[:, turn] = np.where(sizes <= count, few, np.where(taken, last, drawn))
    return places


def sample_positives(
    targets: sp.csr_matrix, rows: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """P̂: labels of at most `count` positives of each query, joined, int64 (with repeats)."""
    starts = targets.indptr[rows].astype(np.int64)
    places = sample_places(targets.indptr[rows + 1] - starts, count, rng)
    flat = (starts[:, None] + places)[places >= 0]
    return targets.indices[flat].astype(np.int64)


def sample_hard_negatives(hard: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Ĥ: at most `count` of each row of H, int32 (n, η·τ) with -1 where there is none; joined, int64."""
    if count == 0 or hard.size == 0:
        return np.zeros(0, dtype=np.int64)
    return hard[sample_in_rows(hard >= 0, count, rng)].astype(np.int64)


def pairs_of(targets: sp.csr_matrix, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs of some rows in blocks of bounded size (or of one row).

    Args:
        targets: CSR (N, L).
        rows: int64 (n,).

    Yields:
        int64 places in `rows`, and int64 places in the flat arrays of `targets`.
    """
    starts = targets.indptr[rows].astype(np.int64)
    lengths = targets.indptr[rows + 1] - starts
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(rows):
        before = ends[begin] - lengths[begin]
        end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS_AT_ONCE, side="right")))
        sizes = lengths[begin:end]
        row = np.repeat(np.arange(begin, end), sizes)
        offsets = starts[begin:end] - (ends[begin:end] - sizes - before)
        yield row, np.arange(len(row)) + np.repeat(offsets, sizes)
        begin = end


def positives_in_pool(targets: sp.csr_matrix, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Targets of P_i ∩ L_B for each query, float32 (n, m). Its cost depends on the batch alone.

    Args:
        targets: CSR (N, L) of the training set.
        rows: int64 (n,) query rows.
        labels: int64 (m,) distinct, ascending.
    """
    positives = np.zeros((len(rows), len(labels)), dtype=np.float32)
    if not len(labels):
        return positives
    for query, flat in pairs_of(targets, rows):
        owned = targets.indices[flat]
        place = np.searchsorted(labels, owned)
        place[place == len(labels)] = 0
        found = labels[place] == owned
        positives[query[found], place[found]] = targets.data[flat[found]]
    return positives


def filtered_in_pool(filtered: sp.csr_matrix, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which pairs of a batch and its pool are neither positive nor negative, bool (n, m).

    Args:
        filtered: CSR bool (N, L) of the training set.
        rows: int64 (n,) query rows.
        labels: int64 (m,) distinct, ascending.
    """
    return positives_in_pool(filtered, rows, labels) > 0


def label_pool(
    targets: sp.csr_matrix,
    rows: np.ndarray,
    hard: np.ndarray,
    positives: int,
    hard_negatives: int,
    rng: np.random.Generator,
) -> LabelPool:
    """L_B = ∪ P̂_i ∪ Ĥ_i and P_i^B = P_i ∩ L_B of one batch.

    Args:
        targets: CSR (N, L) of the training set.
        rows: int64 (n,) query rows of the batch.
        hard: int32 (n, η·τ), the batch's rows of H.
        positives: β.
        hard_negatives: η.
        rng: the source of both samples.
    """
    sampled = sample_positives(targets, rows, positives, rng)
    mined = sample_hard_negatives(hard, hard_negatives, rng)
    labels = np.unique(np.concatenate([sampled, mined]))
    return LabelPool(labels, positives_in_pool(targets, rows, labels))


def widened(pool: LabelPool, targets: sp.csr_matrix, rows: np.ndarray, further: np.ndarray) -> LabelPool:
    """The pool with further labels, int64 with repeats: the classifier's, which costs no encoding."""
    if not len(further):
        return pool
    labels = np.union1d(pool.labels, further)
    return LabelPool(labels, positives_in_pool(targets, rows, labels))
