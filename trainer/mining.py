"""Nearest labels of each query by Φ_D: hard negatives for training, exact rankings for evaluation."""

from __future__ import annotations

import os
from contextlib import nullcontext

import hnswlib
import numpy as np
import scipy.sparse as sp
import torch

from bidmatch.base.console import progress
from trainer.distributed import Workers
from trainer.sampling import pairs_of

_SCORES_AT_ONCE = 16_000_000
_QUERIES_AT_ONCE = 65_536


def exact_top_k(
    queries: torch.Tensor,
    labels: torch.Tensor,
    k: int,
    label: str = "",
    excluded: sp.csr_matrix | None = None,
) -> np.ndarray:
    """The k labels of largest inner product with each query, best first.

    Args:
        queries: float (n, d).
        labels: float (L, d), on the same device.
        k: at most L are returned.
        label: what the progress line is called; empty for none.
        excluded: CSR (n, L), the pairs that are not to be found; None for none.

    Returns:
        int64 (n, min(k, L)), -1 where only excluded labels are left.
    """
    k = min(k, len(labels))
    block = max(1, _SCORES_AT_ONCE // max(1, len(labels)))
    found = np.empty((len(queries), k), dtype=np.int64)
    with progress(label, len(queries), "queries") if label else nullcontext() as step:
        for start in range(0, len(queries), block):
            scores = queries[start : start + block] @ labels.T
            if excluded is not None:
                pairs = excluded[start : start + block].tocoo()
                row, column = (torch.from_numpy(at.astype(np.int64)) for at in (pairs.row, pairs.col))
                scores[row.to(scores.device), column.to(scores.device)] = -torch.inf
            best = torch.topk(scores, k, dim=1)
            rows = best.indices if excluded is None else best.indices.masked_fill(best.values.isneginf(), -1)
            found[start : start + block] = rows.cpu().numpy()
            if step is not None:
                step.advance(len(scores))
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
    index: hnswlib.Index, queries: np.ndarray, labels: np.ndarray, k: int, threads: int
) -> np.ndarray:
    """As `exact_top_k`, by an HNSW index of the labels (ef at least 2k); int64 (n, min(k, L))."""
    k = min(k, len(labels))
    index.set_ef(max(2 * k, 64))
    found = np.empty((len(queries), k), dtype=np.int64)
    with progress("mining: searching hard negatives", len(queries), "queries") as step:
        for start in range(0, len(queries), 50_000):
            block = queries[start : start + 50_000]
            try:
                rows, _ = index.knn_query(block, k=k, num_threads=threads)
            except RuntimeError:  # a part of the graph that the search cannot reach leaves fewer than k
                rows = exact_top_k(torch.from_numpy(block), torch.from_numpy(labels), k)
            found[start : start + 50_000] = rows
            step.advance(len(rows))
    return found


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
    hard = np.full((len(candidates), keep), -1, dtype=np.int32)
    labels = clicks.shape[1]
    for begin in range(0, len(candidates), _QUERIES_AT_ONCE):
        queries = np.arange(begin, min(begin + _QUERIES_AT_ONCE, len(candidates)))
        part = candidates[queries]
        owned = np.zeros(part.shape, dtype=bool)
        own = np.arange(len(part))[:, None] * labels + part
        for row, flat in pairs_of(clicks, first + queries):
            owned |= np.isin(own, row * labels + clicks.indices[flat].astype(np.int64))
        order = np.cumsum(~owned, axis=1) - 1
        row, column = np.nonzero(~owned & (order < keep))
        hard[begin + row, order[row, column]] = part[row, column]
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
        candidates = exact_top_k(queries[share], labels, count, "mining hard negatives")
    else:
        threads = threads or os.cpu_count() or 1
        vectors = labels.cpu().numpy()
        # The others wait, so their cores are free; one thread stays one, for a run that must be repeatable.
        many = threads * workers.local_count if threads > 1 else 1
        index = workers.first(lambda: build_index(vectors, many))
        candidates = approximate_top_k(index, queries[share].cpu().numpy(), vectors, count, threads)
    own = torch.from_numpy(without_positives(candidates, clicks, keep, share.start))
    return workers.gather(own, [part.stop - part.start for part in shares]).numpy()
