"""The one in-memory form of a data set, whatever files it came from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import scipy.sparse as sp
from pydantic import BaseModel


class SplitRecord(BaseModel):
    """How the held-out queries were chosen, recorded with every run and bundle.

    Attributes:
        kind: `given` (the data came with its own test files) or `by_query_hash`.
        share: share of queries held out, of those with `by_query_hash`; 0 where the split was given.
        seed: salt of the hash.
        train_queries: queries left for training.
        test_queries: queries held out.
    """

    kind: str
    share: float = 0.0
    seed: int = 0
    train_queries: int = 0
    test_queries: int = 0


class ReadReport(BaseModel):
    """What a reader recognised and counted; printed by every command that reads data.

    Attributes:
        format: human name of the format, such as "Google Ads search terms report (CSV, UTF-16)".
        files: paths read, as given.
        queries: distinct queries (by key).
        phrases: distinct phrases (by key and match type).
        pairs: distinct (query, phrase) pairs.
        total_weight: sum of the weights.
        rows: data rows seen.
        duplicates_merged: rows whose pair was already there; their weights were added up.
        filter_pairs: pairs that a filter file takes out of rankings, by part ("train", "test").
        skipped: reason -> number of rows left out for it.
        columns: role -> the column used for it, such as {"query": "Search term", "weight": "Clicks"}.
        notes: other things said aloud, such as how the encoding was recognised.
        fingerprint: hex digest of the normalised pairs, whatever the order or the file format.
    """

    format: str
    files: list[str] = []
    queries: int = 0
    phrases: int = 0
    pairs: int = 0
    total_weight: float = 0.0
    rows: int = 0
    duplicates_merged: int = 0
    filter_pairs: dict[str, int] = {}
    skipped: dict[str, int] = {}
    columns: dict[str, str] = {}
    notes: list[str] = []
    fingerprint: str = ""


@dataclass(frozen=True)
class Interactions:
    """Queries and the phrases that belong to them.

    Attributes:
        queries: Arrow `large_string` array, length N: each query's key, distinct.
        clicks: CSR float32 matrix (N, L): weight (> 0) of each pair; columns index `Dataset.phrases`;
            sorted indices, no explicit zeros, no duplicates.
        filtered: CSR bool matrix (N, L) of the pairs that the data's filter file names, disjoint from
            `clicks`, or None where it has no such file. A filtered phrase is neither right nor wrong for its
            query: it is taken out of a ranking before places are counted, and is no negative in training.
    """

    queries: pa.Array
    clicks: sp.csr_matrix
    filtered: sp.csr_matrix | None = None

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, rows: np.ndarray) -> Interactions:
        """The interactions of the given query rows, in that order."""
        filtered = None if self.filtered is None else self.filtered[rows]
        return Interactions(self.queries.take(pa.array(rows)), self.clicks[rows], filtered)


@dataclass(frozen=True)
class Dataset:
    """A click log, read, normalised and split.

    Attributes:
        phrases: Arrow table of L rows: `id` (string, unique), `text` (string, original spelling after
            normalisation), then the user's columns (such as `match_type`), if any.
        train: training interactions, (N_train, L).
        test: held-out interactions, (N_test, L); no query of it is in `train`.
        split: how `test` was chosen.
        report: what was read.
    """

    phrases: pa.Table
    train: Interactions
    test: Interactions
    split: SplitRecord
    report: ReadReport = field(default_factory=lambda: ReadReport(format="in memory"))

    @property
    def filtered(self) -> sp.csr_matrix | None:
        """Pairs to take out of the test queries' rankings: `test.filtered`."""
        return self.test.filtered
