"""Vectors to phrases: the HNSW index of a bundle, and exact search over its vectors."""

from __future__ import annotations

import hnswlib
import numpy as np

from bidmatch.base.errors import DamagedError
from export.bundle.format import INDEX
from export.bundle.read import Bundle

_QUERY_BLOCK = 512
_ROW_BLOCK = 32_768


def exact_topk(queries: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k rows of largest inner product, in blocks, so that memory does not grow with L.

    Args:
        queries: float32 (n, dim).
        vectors: float32 (L, dim), a memory map will do.
        k: at least 1; at most L rows are returned.

    Returns:
        Rows, int64 (n, k), and scores, float32 (n, k), best first, equal scores by row.
    """
    k = min(k, len(vectors))
    rows = np.empty((len(queries), k), dtype=np.int64)
    scores = np.empty((len(queries), k), dtype=np.float32)
    for start in range(0, len(queries), _QUERY_BLOCK):
        part = slice(start, start + _QUERY_BLOCK)
        rows[part], scores[part] = _topk_block(queries[part], vectors, k)
    return rows, scores


def _topk_block(queries: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    n = len(queries)
    rows = np.empty((n, 0), dtype=np.int64)
    scores = np.empty((n, 0), dtype=np.float32)
    for start in range(0, len(vectors), _ROW_BLOCK):
        new = queries @ vectors[start : start + _ROW_BLOCK].T
        take = min(k, new.shape[1])
        best = np.argpartition(-new, take - 1, axis=1)[:, :take]
        last = np.take_along_axis(new, best, axis=1).min(axis=1)
        # Where more rows tie for the last places than there are places, the partition takes any of them.
        for query in np.flatnonzero((new >= last[:, None]).sum(axis=1) > take):
            best[query] = np.argsort(-new[query], kind="stable")[:take]
        rows = np.concatenate([rows, best + start], axis=1)
        scores = np.concatenate([scores, np.take_along_axis(new, best, axis=1)], axis=1)
        order = np.lexsort((rows, -scores), axis=1)[:, :k]
        rows, scores = np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)
    return rows, scores


class PhraseIndex:
    """The phrases nearest to a vector. Safe to search from several threads at once.

    `ef` is state that all searches of an hnswlib index share, so it is set once, here; a search that wants a
    wider one asks hnswlib for that many results (it searches with the larger of ef and k) and keeps k.

    Args:
        bundle: a verified bundle.

    Attributes:
        count: number of phrases, L.
        dim: width of the vectors.
        ef: width of a search unless it asks for more.

    Raises:
        DamagedError: hnswlib does not accept the index, or its file changed since it was verified.
    """

    def __init__(self, bundle: Bundle):
        self.count = bundle.manifest.counts.phrases
        self.dim = bundle.manifest.dim
        self.ef = bundle.manifest.index.ef
        self._vectors = bundle.vectors
        self._index = hnswlib.Index(space="ip", dim=self.dim)
        bundle.check_unchanged(INDEX)
        try:
            self._index.load_index(bundle.pinned_path(INDEX), max_elements=self.count)
        except RuntimeError as error:
            raise DamagedError(f"{bundle.path}: {INDEX} cannot be loaded: {error}") from error
        bundle.check_unchanged(INDEX)
        self._index.set_ef(self.ef)

    def search(self, vectors: np.ndarray, k: int, ef: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest phrases of each vector, on the calling thread.

        Args:
            vectors: float32 (n, dim), finite.
            k: at least 1; more than L is taken as L.
            ef: a wider search than the bundle's; a narrower one is taken as the bundle's.

        Returns:
            Phrase rows, int64 (n, k), and scores, float32 (n, k): inner products, that is cosine plus cosine,
            in [-2, 2], best first, equal scores by row.

        Raises:
            ValueError: k < 1, or the vectors have the wrong shape or are not finite.
        """
        vectors = self._checked(vectors, k)
        k = min(k, self.count)
        if not len(vectors):
            return np.zeros((0, k), dtype=np.int64), np.zeros((0, k), dtype=np.float32)
        try:
            rows, distances = self._knn(vectors, k, ef)
        except RuntimeError:  # a part of the graph that the search cannot reach leaves fewer than k
            return self.exact(vectors, k) if len(vectors) == 1 else self._one_by_one(vectors, k, ef)
        return _ordered(rows.astype(np.int64), 1.0 - distances, k)

    def exact(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """What `search` would return with perfect recall, by scanning all vectors."""
        return exact_topk(self._checked(vectors, k), self._vectors, k)

    def _knn(self, vectors: np.ndarray, k: int, ef: int | None) -> tuple[np.ndarray, np.ndarray]:
        width = k if ef is None or ef <= self.ef else max(k, min(ef, self.count))
        rows, distances = self._index.knn_query(vectors, k=width, num_threads=1)
        return rows, distances

    def _one_by_one(self, vectors: np.ndarray, k: int, ef: int | None) -> tuple[np.ndarray, np.ndarray]:
        found = [self.search(vectors[i : i + 1], k, ef) for i in range(len(vectors))]
        return np.concatenate([rows for rows, _ in found]), np.concatenate([scores for _, scores in found])

    def _checked(self, vectors: np.ndarray, k: int) -> np.ndarray:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ValueError(f"vectors of shape {vectors.shape} do not fit an index of width {self.dim}")
        if not np.isfinite(vectors).all():
            raise ValueError("vectors must be finite")
        return vectors


def _ordered(rows: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)
