"""What two sides answer to some queries, and what of it they have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Answers:
    """The matches of n queries, by query, best first.

    Attributes:
        rows: int64 (m,), the query.
        names: large_string (m,), what tells that two phrases are the same; none twice for one query.
        phrases: large_string (m,), the phrases as people read them.
        scores: float64 (m,); NaN where they are not comparable with the other side's.
        relevance: float64 (m,); NaN where it is not known.
    """

    rows: np.ndarray
    names: pa.Array
    phrases: pa.Array
    scores: np.ndarray
    relevance: np.ndarray


@dataclass(frozen=True)
class Pair:
    """The answers of A and B to n queries.

    Attributes:
        a: A's.
        b: B's.
        many_a: int64 (n,), matches of each query in A.
        many_b: likewise in B.
        common: int64 (n,), those in both.
        at_a: int64, the common matches among A's; `at_b` among B's, in the same order.
        same_first: bool (n,), whether the first match is the same.
        lost: int64, A's matches that are not B's, in A's order.
        gained: int64, B's that are not A's.
    """

    a: Answers
    b: Answers
    many_a: np.ndarray
    many_b: np.ndarray
    common: np.ndarray
    at_a: np.ndarray
    at_b: np.ndarray
    same_first: np.ndarray
    lost: np.ndarray
    gained: np.ndarray


def pair(a: Answers, b: Answers, n: int) -> Pair:
    """Hold the answers to the same n queries against each other."""
    codes = pa.chunked_array([a.names, b.names], pa.large_string()).combine_chunks().dictionary_encode()
    numbers = codes.indices.to_numpy().astype(np.int64)
    apart = max(1, len(codes.dictionary))
    of_a, of_b = a.rows * apart + numbers[: len(a.rows)], b.rows * apart + numbers[len(a.rows) :]
    _, at_a, at_b = np.intersect1d(of_a, of_b, assume_unique=True, return_indices=True)
    first = at_a[(_ranks(a.rows)[at_a] == 0) & (_ranks(b.rows)[at_b] == 0)]
    return Pair(
        a,
        b,
        np.bincount(a.rows, minlength=n),
        np.bincount(b.rows, minlength=n),
        np.bincount(a.rows[at_a], minlength=n),
        at_a,
        at_b,
        np.bincount(a.rows[first], minlength=n) > 0,
        np.setdiff1d(np.arange(len(a.rows)), at_a, assume_unique=True),
        np.setdiff1d(np.arange(len(b.rows)), at_b, assume_unique=True),
    )


def no_answers() -> Answers:
    """To no queries."""
    none, texts = np.zeros(0), pa.array([], pa.large_string())
    return Answers(np.zeros(0, np.int64), texts, texts, none, none)


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column of strings as one array of large_string."""
    return column.cast(pa.large_string()).combine_chunks()


def _ranks(rows: np.ndarray) -> np.ndarray:
    return np.arange(len(rows)) - np.searchsorted(rows, rows)
