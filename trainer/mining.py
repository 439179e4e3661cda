"""Nearest labels of each query by Φ_D: hard negatives for training, exact rankings for evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import hnswlib
import numpy as np
import scipy.sparse as sp
import torch

from bidmatch.base.console import progress
from trainer.distributed import Workers
from trainer.sampling import pairs_of

# A GPU is kept waiting by small blocks; its memory holds a gigabyte of scores.
_SCORES_AT_ONCE = {"cpu": 16_000_000, "cuda": 256_000_000}
_QUERIES_AT_ONCE = 65_536


def exact_top_k(
    queries: torch.Tensor, labels: torch.Tensor, k: int, excluded: sp.csr_matrix | None = None
) -> np.ndarray:
    """The k labels of largest inner product with each query, best first.

    Args:
        queries: float (n, d).
        labels: float (L, d), on the same device.
        k: at most L are returned.
        excluded: CSR (n, L), the pairs that are not to be found; None for none.

    Returns:
        int64 (n, min(k, L)), -1 where only excluded labels are left.
    """
    k = min(k, len(labels))
    block = max(1, _SCORES_AT_ONCE[queries.device.type] // max(1, len(labels)))
    found = np.empty((len(queries), k), dtype=np.int64)
    for start in range(0, len(queries), block):
        scores = queries[start : start + block] @ labels.T
        if excluded is not None:
            pairs = excluded[start : start + block].tocoo()
            row, column = (torch.from_numpy(at.astype(np.int64)) for at in (pairs.row, pairs.col))
            scores[row.to(scores.device), column.to(scores.device)] = -torch.inf
        best = torch.topk(scores, k, dim=1)
        rows = best.indices if excluded is None else best.indices.masked_fill(best.values.isneginf(), -1)
        found[start : start + block] = rows.cpu().numpy()
    return found


def build_index(labels: np.ndarray, threads: int) -> hnswlib.Index:
    """HNSW index of float (L, d) vectors by inner product (M 16).

    With more than one thread two builds may differ in a few neighbours.
    """
    index = hnswlib.Index(space="ip", dim=labels.shape[1])
    index.init_index(max_elements=len(labels), M=16, ef_construction=100)
    with progress("mining: building the label index", len(labels), "labels") as step:
        for start in range(0, len(labels), 50_000):
            index.add_items(labels[start : start + 50_000], num_threads=threads)
            step.advance(min(50_000, len(labels) - start))
    return index


def approximate_top_k(
    index: hnswlib.Index, queries: torch.Tensor, labels: np.ndarray, k: int, threads: int
) -> np.ndarray:
    """As `exact_top_k`, by an HNSW index of the labels (ef at least 2k); int64 (n, min(k, L))."""
    k = min(k, len(labels))
    index.set_ef(max(2 * k, 64))
    try:
        found, _ = index.knn_query(queries.cpu().numpy(), k=k, num_threads=threads)
    except RuntimeError:  # a part of the graph that the search cannot reach leaves fewer than k
        return exact_top_k(queries.cpu(), torch.from_numpy(labels), k)
    return found.astype(np.int64)


def without_positives(candidates: np.ndarray, clicks: sp.csr_matrix, keep: int, first: int = 0) -> np.ndarray:
    """H_i: the first `keep` candidates of each query that are no positives of it.

    Args:
        candidates: int64 (n, c), best first.
        clicks: CSR (N, L).
        keep: |H_i|.
        first: the query of the first row of `candidates`; the others are those behind it.

    Returns:
        int32 (n, keep), -1 where too few were left.
    """
    labels = clicks.shape[1]
    queries = np.arange(len(candidates))
    pairs = queries[:, None] * labels + candidates
    owned = np.zeros(candidates.shape, dtype=bool)
    for row, flat in pairs_of(clicks, first + queries):
        owned |= np.isin(pairs, row * labels + clicks.indices[flat].astype(np.int64))
    order = np.cumsum(~owned, axis=1) - 1
    row, column = np.nonzero(~owned & (order < keep))
    hard = np.full((len(candidates), keep), -1, dtype=np.int32)
    hard[row, order[row, column]] = candidates[row, column]
    return hard


def mine_hard_negatives(
    queries: torch.Tensor,
    labels: torch.Tensor,
    clicks: sp.csr_matrix,
    keep: int,
    exact_up_to: int,
    threads: int,
    workers: Workers | None = None,
) -> np.ndarray:
    """H_i = nearest labels of Φ_D(x_i) minus P_i, |H_i| = `keep` (Algorithm 1), int32 (N, keep), -1 padded.

    Of several processes each searches for its share of the queries, and all end with the whole.

    Args:
        queries: Φ_D of the training queries, float (N, d).
        labels: Φ_D of all labels, float (L, d).
        clicks: CSR (N, L).
        keep: η·τ.
        exact_up_to: largest L that is searched exactly; beyond, by HNSW.
        threads: of the HNSW build and search; 0 for all cores.
        workers: the processes.
    """
    workers = workers or Workers()
    shares = workers.shares(len(queries))
    share = shares[workers.rank]
    spare = int(np.percentile(np.diff(clicks.indptr), 99)) if clicks.shape[0] else 0
    count = keep + min(spare, 256)
    if len(labels) <= exact_up_to:
        search: Callable[[torch.Tensor], np.ndarray] = partial(exact_top_k, labels=labels, k=count)
    else:
        threads = threads or os.cpu_count() or 1
        vectors = labels.cpu().numpy()
        # The others wait, so their cores are free; one thread stays one, for a run that must be repeatable.
        many = threads * workers.local_count if threads > 1 else 1
        index = workers.first(lambda: build_index(vectors, many))
        search = partial(approximate_top_k, index, labels=vectors, k=count, threads=threads)
    own = np.empty((share.stop - share.start, keep), dtype=np.int32)
    with progress("mining hard negatives", len(own), "queries") as step:
        # Block by block, so that the candidates of few queries are held at a time.
        for start in range(0, len(own), _QUERIES_AT_ONCE):
            rows = slice(start, min(start + _QUERIES_AT_ONCE, len(own)))
            first = share.start + start
            candidates = search(queries[first : share.start + rows.stop])
            own[rows] = without_positives(candidates, clicks, keep, first)
            step.advance(len(candidates))
    sizes = [part.stop - part.start for part in shares]
    return workers.gather(torch.from_numpy(own), sizes).numpy()
