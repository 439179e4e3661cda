"""The compiled searches, from `native/`. Arrays are C-contiguous; the GIL is released while they work."""

import numpy as np

KERNELS: str
"""The set of inner products that this processor runs: `avx2` or `portable`."""

_Found = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, int64 (n, k), best first, -1 where there are fewer, and the parts of their scores, float32 (n, k)."""

class Graph:
    """An HNSW graph, walked by vectors in 8 bits where it lies. Safe to search from several threads at once.

    `allowed` and `off` hold a bit a row, least significant first (`np.packbits(..., bitorder="little")`); of
    query i the rows `denied_rows[denied_offsets[i]:denied_offsets[i + 1]]`, sorted, are left out.

    Args:
        vectors: float32 (L, dim).
        codes: int8 (L, dim), the vectors over the steps.
        steps: float32 (1, dim).
        links: uint32 (L, degree), see `export.bundle.read.GraphArrays`.
        upper: uint32 (n, 2 + degree above), likewise.
        split: width of the Φ_D part; the scores' parts lie between plus and minus the weights.

    Raises:
        ValueError: the arrays do not fit each other.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        codes: np.ndarray,
        steps: np.ndarray,
        links: np.ndarray,
        upper: np.ndarray,
        *,
        split: int,
        encoder_weight: float,
        classifier_weight: float,
    ) -> None: ...
    def __len__(self) -> int: ...
    def search(
        self,
        queries: np.ndarray,
        k: int,
        ef: int,
        *,
        allowed: np.ndarray | None = None,
        admitted: int = ...,
        off: np.ndarray | None = None,
        denied_offsets: np.ndarray | None = None,
        denied_rows: np.ndarray | None = None,
    ) -> _Found:
        """The k best admitted rows by the graph; by comparing all of them where the graph gives fewer.

        `admitted` is the number of bits set in `allowed`: a search that would compare more vectors than that
        compares just the allowed ones.
        """
    def exact(
        self,
        queries: np.ndarray,
        k: int,
        *,
        rows: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
        off: np.ndarray | None = None,
        denied_offsets: np.ndarray | None = None,
        denied_rows: np.ndarray | None = None,
    ) -> _Found:
        """The k best admitted rows of those listed (int32, sorted), or of all."""

class LiveGraph:
    """An HNSW graph that one thread links rows into while others append and search, without a lock."""

    def __init__(
        self,
        dim: int,
        *,
        M: int,
        ef_construction: int,
        seed: int,
        split: int,
        encoder_weight: float,
        classifier_weight: float,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def linked(self) -> int:
        """Rows before this one are found by the graph, the others by comparing them one by one."""
    def append(self, vectors: np.ndarray, searchable: np.ndarray) -> int:
        """Add rows, float32 (n, dim), never found where `searchable` (uint8) is 0; the first's number."""
    def link(self, most: int) -> int:
        """Put up to so many waiting rows into the graph; returns how many."""
    def search(
        self,
        queries: np.ndarray,
        k: int,
        ef: int,
        limit: int,
        *,
        allowed: np.ndarray | None = None,
        off: np.ndarray | None = None,
        denied_offsets: np.ndarray | None = None,
        denied_rows: np.ndarray | None = None,
        exactly: bool = False,
        first: int = 0,
    ) -> _Found:
        """The k best admitted rows before `limit`, numbered from `first`; see `Graph.search`."""
    def score(self, queries: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both parts of the scores of rows, int64 (n, c), -1 for none: float32 (n, c) each."""

def score_wide(
    queries: np.ndarray,
    rows: np.ndarray,
    wide: np.ndarray,
    scales: np.ndarray,
    *,
    split: int,
    encoder_weight: float,
    classifier_weight: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Both parts of the scores of rows, int64 (n, c), -1 for none, by vectors in 8 bits: float32 (n, c) each.

    Args:
        queries: float32 (n, dim).
        rows: rows of the vectors.
        wide: int8 (L, dim).
        scales: float32 (L, 2), of the Φ_D part and of the rest.
        split: width of the Φ_D part.
        encoder_weight: the first part lies between plus and minus this.
        classifier_weight: likewise.

    Raises:
        ValueError: the shapes do not fit.
        IndexError: there is no such row.
    """

def hnswlib_upper(
    data: np.ndarray, start: int, count: int, links_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where hnswlib's file has links above level 0: nodes (int64), their top levels, where their links begin.

    Args:
        data: the whole file, uint8.
        start: where its nodes end.
        count: nodes.
        links_bytes: of a node's links at one level.

    Raises:
        ValueError: the file ends early, or a size is no multiple of `links_bytes`.
    """
