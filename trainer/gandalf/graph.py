"""The label graph of a click log, a block of labels at a time.

A block's rows of G = YᵀY are made, turned into targets, cut at δ and dropped before the next block, so that
neither L x L nor all of G is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.special import expit

# Pairs of labels held at once while G is made; about 30 bytes each.
BLOCK_PAIRS = 1 << 23


@dataclass(frozen=True)
class ClickGraph:
    """Who clicked what, seen from both sides. Weights do not count here: a pair is there or it is not.

    Attributes:
        by_query: Y, CSR (N, L) int32 of ones, sorted, without repeats.
        by_label: Yᵀ, CSR (L, N) int32 of ones, likewise.
    """

    by_query: sp.csr_matrix
    by_label: sp.csr_matrix

    @property
    def frequency(self) -> np.ndarray:
        """n_l = G_ll, the queries of each label, int64 (L,)."""
        return np.diff(self.by_label.indptr).astype(np.int64)

    @property
    def degree(self) -> np.ndarray:
        """|P_q|, the labels of each query, int64 (N,)."""
        return np.diff(self.by_query.indptr).astype(np.int64)


def click_graph(clicks: sp.csr_matrix) -> ClickGraph:
    """The graph of the training pairs, CSR (N, L) of any weights; repeated pairs count once, zeros do not."""
    pairs = sp.csr_matrix(clicks, copy=True)
    pairs.sum_duplicates()
    pairs.eliminate_zeros()
    pairs.data = np.ones(pairs.nnz, dtype=np.int32)
    return ClickGraph(pairs, pairs.T.tocsr())


def blocks(weights: np.ndarray, limit: int) -> Iterator[slice]:
    """Slices of consecutive items whose int64 `weights` add up to `limit` at most, or of one item alone."""
    ends = np.cumsum(weights)
    start = 0
    while start < len(weights):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield slice(start, stop)
        start = stop


def cooccurrence(
    graph: ClickGraph, labels: np.ndarray, limit: int
) -> Iterator[tuple[np.ndarray, sp.csr_matrix]]:
    """Rows of G = YᵀY, in blocks of about `limit` pairs.

    Args:
        graph: of the training pairs.
        labels: int64 (M,), whose rows.
        limit: pairs of a block; a label with more of them is a block of its own (at most L pairs).

    Yields:
        The block's labels, int64 (b,), and G_ij for them, CSR (b, L) int32.
    """
    partners = np.minimum(graph.by_label @ graph.degree, graph.by_query.shape[1])
    for block in blocks(partners[labels], limit):
        yield labels[block], graph.by_label[labels[block]] @ graph.by_query


def kept(places: sp.csr_matrix, values: np.ndarray, keep: np.ndarray) -> sp.csr_matrix:
    """CSR of some of the stored places of a matrix, with new values.

    Args:
        places: CSR with n stored entries.
        values: (n,), their values.
        keep: bool (n,), which of them stay.
    """
    chosen = np.flatnonzero(keep)
    indptr = np.searchsorted(chosen, places.indptr)
    return sp.csr_matrix((values[chosen], places.indices[chosen], indptr), shape=places.shape)


def conditional_rows(
    graph: ClickGraph, labels: np.ndarray, delta: float, limit: int = BLOCK_PAIRS
) -> Iterator[tuple[np.ndarray, sp.csr_matrix]]:
    """Equation 1.6: G_ij / G_jj for the text of label j, where that exceeds δ.

    Yields:
        The block's labels, int64 (b,), and their targets, CSR (b, L) float64.
    """
    frequency = graph.frequency
    for block, G in cooccurrence(graph, labels, limit):
        own = np.repeat(frequency[block], np.diff(G.indptr))
        targets = G.data / own
        yield block, kept(G, targets, targets > delta)


def glas_rows(
    graph: ClickGraph, labels: np.ndarray, delta: float, limit: int = BLOCK_PAIRS
) -> Iterator[tuple[np.ndarray, sp.csr_matrix]]:
    """Section 1.3.2: σ(S_ij), S_ij = (G_ij/G_jj + G_ij/G_ii) / 2 (equation 1.9), where S_ij exceeds δ.

    A pair that never met has S = 0, and read to the letter a target of σ(0) = 0.5. That would be a dense
    L x L matrix; here, as in equation 1.6, what does not exceed δ is left out.

    Yields:
        The block's labels, int64 (b,), and their targets, CSR (b, L) float64 in (0.5, σ(1)].
    """
    frequency = graph.frequency
    for block, G in cooccurrence(graph, labels, limit):
        own = np.repeat(frequency[block], np.diff(G.indptr))
        similarity = 0.5 * (G.data / own + G.data / frequency[G.indices])
        yield block, kept(G, expit(similarity), similarity > delta)
