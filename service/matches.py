"""Queries with their vectors, and their matches, in columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from export.bundle.encoder import QueryVectors

if TYPE_CHECKING:
    from service.live.phrases import LivePhrases


@dataclass(frozen=True)
class Timings:
    """Seconds that each step took for the whole call.

    Attributes:
        tokenise: normalising and tokenising.
        encode: the encoder.
        search: index search, exact-match lookup, merging and ordering.
        rescore: scores from the wide vectors; 0 where there are none, and scores are part of the search.
    """

    tokenise: float = 0.0
    encode: float = 0.0
    search: float = 0.0
    rescore: float = 0.0

    def __add__(self, other: Timings) -> Timings:
        return Timings(
            self.tokenise + other.tokenise,
            self.encode + other.encode,
            self.search + other.search,
            self.rescore + other.rescore,
        )


@dataclass(frozen=True)
class Encoded:
    """Queries with their vectors, those of them that have any text.

    Attributes:
        count: how many queries there were, n.
        asked: int64 (m,), the places of those with text.
        keys: their keys.
        vectors: theirs.
        tokenise: seconds.
        encode: seconds.
    """

    count: int
    asked: np.ndarray
    keys: list[str]
    vectors: QueryVectors
    tokenise: float
    encode: float

    def of(self, places: np.ndarray) -> Encoded:
        """Some of the queries as if they had come alone: places, int64, rising."""
        inside = np.isin(self.asked, places)
        at = np.flatnonzero(inside)
        return Encoded(
            len(places),
            np.searchsorted(places, self.asked[at]),
            [self.keys[i] for i in at.tolist()],
            self.vectors.of(at),
            self.tokenise,
            self.encode,
        )


@dataclass(frozen=True)
class Matches:
    """The matches of n queries, in columns. Query i's are `offsets[i]:offsets[i + 1]`, best first.

    Attributes:
        offsets: int64 (n + 1).
        rows: int64 (m), rows of phrases; no row twice for one query.
        scores: float32 (m), `encoder + classifier`, in -2..2.
        encoder: float32 (m), weighted cosine of Φ_D of query and phrase; 0 where the model has no such head.
        classifier: float32 (m), weighted cosine of Φ_C of the query and the phrase's row of Ψ; likewise.
        relevance: float32 (m), how likely the phrase was clicked in the log, in 0..1; None where there is no
            calibration.
        exact: bool (m), the phrase's key equals the query's key ("exact"), else found by the index ("index").
        timings: what the steps took.
        live: the live phrases that were searched, whose rows come after the bundle's; others may have taken
            their place since.
    """

    offsets: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    encoder: np.ndarray
    classifier: np.ndarray
    relevance: np.ndarray | None
    exact: np.ndarray
    timings: Timings
    live: LivePhrases | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1


def no_matches(n: int, *, calibrated: bool) -> Matches:
    """The matches of n queries that have none."""
    empty = np.empty(0, np.float32)
    return Matches(
        np.zeros(n + 1, np.int64),
        np.empty(0, np.int64),
        empty,
        empty,
        empty,
        empty if calibrated else None,
        np.empty(0, bool),
        Timings(),
    )
