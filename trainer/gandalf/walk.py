"""The label graph from random walks with restart, as ECLARE builds it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp

from trainer.gandalf.graph import ClickGraph, kept

# Steps of all walks of a block; about 60 bytes each.
BLOCK_STEPS = 1 << 21


def visits(
    graph: ClickGraph, labels: np.ndarray, length: int, restart: float, rng: np.random.Generator
) -> np.ndarray:
    """Labels visited by one walk of `length` steps from each label.

    A step goes from the walk's label (with probability `restart`, and in the first step: from its first
    label) to one of that label's queries and on to one of that query's labels, both uniformly. Each step
    takes three numbers of `rng`, walk by walk, so that the outcome does not depend on how labels are blocked.

    Args:
        graph: of the training pairs.
        labels: int64 (b,), where the walks start; each has a query.
        length: ω, steps of a walk.
        restart: p.
        rng: source of the steps.

    Returns:
        int64 (b, ω), the label that each step reached.
    """
    draws = rng.random((len(labels), length, 3))
    fresh = draws[:, :, 0] < restart
    fresh[:, 0] = True
    fresh, to_query, to_label = fresh.ravel(), draws[:, :, 1].ravel(), draws[:, :, 2].ravel()
    reached = np.empty(len(labels) * length, dtype=np.int64)
    # Steps since the last restart, one depth at a time: all walks' first steps, then their second ones.
    places = np.flatnonzero(fresh)
    origin = labels[places // length]
    while len(places):
        queries = _neighbours(graph.by_label, origin, to_query[places])
        reached[places] = _neighbours(graph.by_query, queries, to_label[places])
        places = places[(places + 1) % length != 0] + 1
        places = places[~fresh[places]]
        origin = reached[places - 1]
    return reached.reshape(len(labels), length)


def _neighbours(matrix: sp.csr_matrix, rows: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """A stored column of each row, chosen by draws in [0, 1), int64."""
    starts = matrix.indptr[rows]
    chosen = starts + (draws * (matrix.indptr[rows + 1] - starts)).astype(np.int64)
    return matrix.indices[chosen].astype(np.int64)


def random_walk_rows(
    graph: ClickGraph,
    labels: np.ndarray,
    delta: float,
    length: int,
    restart: float,
    rng: np.random.Generator,
    limit: int = BLOCK_STEPS,
) -> Iterator[tuple[np.ndarray, sp.csr_matrix]]:
    """Equation 1.6 with Ĝ_ij, the visits to label i of a walk from label j, in place of G_ij.

    The target is min(1, Ĝ_ij / Ĝ_jj), where that exceeds δ; a walk that never came back counts as Ĝ_jj = 1.
    With restart 1 and long walks it is the co-occurrence with each query weighted by 1/|P_q|; a lower restart
    adds partners of partners.

    Yields:
        The block's labels, int64 (b,), and their targets, CSR (b, L) float64; at most ω a label.
    """
    frequency = graph.frequency
    size = max(1, limit // length)
    for start in range(0, len(labels), size):
        block = labels[start : start + size]
        walking = np.flatnonzero(frequency[block])
        reached = visits(graph, block[walking], length, restart, rng)
        counts = sp.coo_matrix(
            (np.ones(reached.size, dtype=np.int32), (np.repeat(walking, length), reached.ravel())),
            shape=(len(block), len(frequency)),
        ).tocsr()
        lengths = np.diff(counts.indptr)
        row = np.repeat(np.arange(len(block)), lengths)
        returned = np.ones(len(block), dtype=np.int64)
        home = counts.indices == block[row]
        returned[row[home]] = counts.data[home]
        targets = np.minimum(counts.data / returned[row], 1.0)
        yield block, kept(counts, targets, targets > delta)
