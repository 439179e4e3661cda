"""Vectors to phrases: the HNSW index of a bundle, and exact search over its vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bidmatch.base.errors import BidmatchError
from export.bundle import _native
from export.bundle.format import INDEX_FILES, VECTORS
from export.bundle.read import Bundle, GraphArrays
from export.bundle.weights import BlendRecord, narrow_weights

_QUERY_BLOCK = 512
_ROW_BLOCK = 32_768
# Admitted rows are kept as a list, beside their bits, up to one row in so many.
_LISTED_SHARE = 5
# A graph search that admits n of L rows compares about 30 * ef * L / n vectors in random order, a scan of the
# list n, each at about two thirds of the cost.
_COMPARED = 45
# Where rows are left out, those that are near each other are farther apart in the graph: a search that admits
# a share of the rows is wider by its inverse, up to so many times.
_WIDER = 2


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
        block = vectors[start : start + _ROW_BLOCK]
        numbers = np.arange(start, start + len(block))
        rows, scores = merged_topk(rows, scores, numbers, queries @ block.T, k)
    return rows, scores


def merged_topk(
    rows: np.ndarray, scores: np.ndarray, numbers: np.ndarray, new: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k best of those so far and of a block, best first, equal scores by row.

    Args:
        rows: int64 (n, c), the best so far.
        scores: float32 (n, c), theirs.
        numbers: int64 (m,), rows of the block, ascending and beyond those so far; m >= 1.
        new: float32 (n, m), their scores.
        k: at least 1.
    """
    take = min(k, new.shape[1])
    best = np.argpartition(-new, take - 1, axis=1)[:, :take]
    last = np.take_along_axis(new, best, axis=1).min(axis=1)
    # Where more rows tie for the last places than there are places, the partition takes any of them.
    for query in np.flatnonzero((new >= last[:, None]).sum(axis=1) > take):
        best[query] = np.argsort(-new[query], kind="stable")[:take]
    rows = np.concatenate([rows, numbers[best]], axis=1)
    scores = np.concatenate([scores, np.take_along_axis(new, best, axis=1)], axis=1)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)


class Admitted:
    """The rows that a search may return, where that is not all of them.

    Args:
        total: rows that there are, L.
        rows: int32, sorted; None where they are many, and then there is a mask.
        mask: bool (L,); None where there are rows.

    Attributes:
        count: how many are admitted.
        rows: see above.
    """

    def __init__(self, total: int, rows: np.ndarray | None, mask: np.ndarray | None = None):
        if rows is not None:
            self.count = len(rows)
        else:
            assert mask is not None
            self.count = int(np.count_nonzero(mask))
        self.rows = rows
        self._total, self._mask = total, mask
        self._bits: np.ndarray | None = None

    @classmethod
    def of_mask(cls, mask: np.ndarray) -> Admitted:
        """The rows where a bool (L,) mask is set."""
        if np.count_nonzero(mask) * _LISTED_SHARE <= len(mask):
            return cls(len(mask), np.flatnonzero(mask).astype(np.int32))
        return cls(len(mask), None, mask)

    @classmethod
    def of_rows(cls, rows: np.ndarray, total: int) -> Admitted:
        """Sorted int32 rows of `total`."""
        return cls(total, rows)

    @property
    def bits(self) -> np.ndarray:
        """A bit a row, the least significant first; made when it is first asked for."""
        if self._bits is None:
            mask = self._mask
            if mask is None:
                mask = np.zeros(self._total, bool)
                mask[self.rows] = True
            self._bits = pack(mask)
        return self._bits


def pack(mask: np.ndarray) -> np.ndarray:
    """A bool mask as bits, the least significant first, uint8."""
    return np.packbits(mask, bitorder="little")


@dataclass(frozen=True)
class Denied:
    """Rows that are left out for one query and not for another.

    Attributes:
        offsets: int64 (n + 1); query i's rows are `rows[offsets[i]:offsets[i + 1]]`.
        rows: int32, sorted for each query.
    """

    offsets: np.ndarray
    rows: np.ndarray


class Found(NamedTuple):
    """What a search found, best first: rows and both parts of their scores.

    Attributes:
        rows: int64 (n, k); -1 where there are fewer.
        encoder: float32 (n, k), weighted cosine of the Φ_D parts.
        classifier: float32 (n, k), weighted cosine of the rest.
    """

    rows: np.ndarray
    encoder: np.ndarray
    classifier: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """float32 (n, k): the sum of the parts."""
        return np.asarray(self.encoder + self.classifier)


class IndexUnavailableError(BidmatchError):
    """The index is elsewhere and does not answer now, or not with what belongs to the bundle."""


class Index(Protocol):
    """What finds the phrases nearest to a vector: `PhraseIndex`, or Milvus' (`export.bundle.milvus`).

    Attributes:
        count: number of phrases, L.
        dim: width of the vectors.
        ef: width of a search unless it asks for more.
    """

    count: int
    dim: int
    ef: int

    @property
    def failure(self) -> str | None:
        """Why it can't be searched now; None where it can."""
        ...

    def search(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        ef: int | None = None,
        admitted: Admitted | None = None,
        off: np.ndarray | None = None,
        denied: Denied | None = None,
    ) -> Found:
        """See `PhraseIndex.search`.

        Raises:
            ValueError: as there.
            IndexUnavailableError: it can't be searched now.
        """
        ...

    def exact(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        admitted: Admitted | None = None,
        off: np.ndarray | None = None,
        denied: Denied | None = None,
    ) -> Found:
        """See `PhraseIndex.exact`."""
        ...

    def width(self, ef: int | None, admitted: Admitted | None = None) -> int:
        """See `PhraseIndex.width`."""
        ...

    def compares(self, admitted: Admitted | None, ef: int) -> bool:
        """See `PhraseIndex.compares`."""
        ...


class PhraseIndex:
    """The phrases nearest to a vector. Safe to search from several threads at once: it holds no state.

    The graph is searched in the mapped files, so processes that serve one bundle share it, and opening it
    reads next to nothing. It is walked by the vectors in 8 bits, which takes a quarter of the memory traffic,
    and the `ef` rows that a walk ends with are put in order by the vectors themselves.

    Args:
        bundle: a verified bundle.

    Attributes:
        count: number of phrases, L.
        dim: width of the vectors.
        ef: width of a search unless it asks for more.

    Raises:
        DamagedError: a file changed since it was verified.
    """

    def __init__(self, bundle: Bundle):
        self.failure: str | None = None  # it is in this process
        self.count = bundle.manifest.counts.phrases
        self.dim = bundle.manifest.dim
        self.ef = bundle.manifest.index.ef
        assert bundle.graph is not None
        for name in sorted(INDEX_FILES | {VECTORS}):
            bundle.check_unchanged(name)
        self._graph = searchable(
            bundle.graph, np.asarray(bundle.vectors), bundle.manifest.encoder_dim, bundle.manifest.blend
        )

    def search(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        ef: int | None = None,
        admitted: Admitted | None = None,
        off: np.ndarray | None = None,
        denied: Denied | None = None,
    ) -> Found:
        """The k nearest phrases of each vector, on the calling thread.

        Few admitted rows are compared one by one; of many the graph finds the best. Either way there are k
        where k exist.

        Args:
            vectors: float32 (n, dim), finite.
            k: at least 1; more than L, or than are admitted, is taken as that.
            ef: a wider search than the bundle's; a narrower one is taken as the bundle's.
            admitted: the rows that may be returned; None for all.
            off: bits of rows that may not, see `pack`.
            denied: rows that may not, by query.

        Returns:
            Scores are inner products, that is cosine plus cosine, in [-2, 2], best first, equal ones by row.

        Raises:
            ValueError: k < 1, or the vectors have the wrong shape or are not finite.
        """
        if admitted is not None and self.compares(admitted, max(k, self.width(ef))):
            return self.exact(vectors, k, admitted=admitted, off=off, denied=denied)
        found = self._graph.search(
            checked(vectors, k, self.dim),
            min(k, self.count),
            self.width(ef, admitted),
            allowed=None if admitted is None else admitted.bits,
            admitted=self.count if admitted is None else admitted.count,
            off=off,
            denied_offsets=None if denied is None else denied.offsets,
            denied_rows=None if denied is None else denied.rows,
        )
        return Found(*found)

    def exact(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        admitted: Admitted | None = None,
        off: np.ndarray | None = None,
        denied: Denied | None = None,
    ) -> Found:
        """What `search` would return with perfect recall, by comparing all vectors that are admitted."""
        found = self._graph.exact(
            checked(vectors, k, self.dim),
            min(k, self.count),
            rows=None if admitted is None else admitted.rows,
            allowed=None if admitted is None or admitted.rows is not None else admitted.bits,
            off=off,
            denied_offsets=None if denied is None else denied.offsets,
            denied_rows=None if denied is None else denied.rows,
        )
        return Found(*found)

    def width(self, ef: int | None, admitted: Admitted | None = None) -> int:
        """The ef that a search runs with which asks for `ef`, unless it asks for more phrases than that."""
        return width_of(max(self.ef, ef or 0), self.count, admitted)

    def compares(self, admitted: Admitted | None, ef: int) -> bool:
        """Whether a search of this width compares all admitted rows, for they are few."""
        if admitted is None or admitted.rows is None:
            return False
        return admitted.count**2 <= _COMPARED * ef * self.count


def searchable(
    graph: GraphArrays, vectors: np.ndarray, encoder_dim: int, blend: BlendRecord | None
) -> _native.Graph:
    """The compiled search over a graph and its vectors, float32 (L, dim), which it keeps.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    encoder_weight, classifier_weight = narrow_weights(blend)
    return _native.Graph(
        vectors,
        graph.codes,
        graph.steps,
        graph.links,
        graph.upper,
        split=encoder_dim,
        encoder_weight=encoder_weight,
        classifier_weight=classifier_weight,
    )


def width_of(ef: int, count: int, admitted: Admitted | None) -> int:
    """The width of a search of `count` rows that asks for `ef`: wider where rows are left out."""
    if admitted is not None:
        ef = int(ef * min(_WIDER, count / max(1, admitted.count)))
    return min(ef, count)


def checked(vectors: np.ndarray, k: int, dim: int) -> np.ndarray:
    """Vectors to search with, as float32 (n, dim), C-contiguous.

    Raises:
        ValueError: k < 1, or they have the wrong shape or are not finite.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors of shape {vectors.shape} do not fit an index of width {dim}")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors must be finite")
    return vectors
