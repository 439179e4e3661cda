"""A loaded bundle that matches queries to phrases: tokenise, encode, search. It starts no threads of its own.

What the HTTP service and offline scoring both run. `Engine.match` may be called from several threads at
once: tokenizer, ONNX Runtime and hnswlib release the GIL and share no state between calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field

from bidmatch.base import text
from export.bundle.encoder import QueryEncoder
from export.bundle.index import PhraseIndex
from export.bundle.read import Bundle, open_bundle
from service.phrase_keys import PhraseKeys


class EngineSettings(BaseModel):
    """How an engine uses the machine.

    Attributes:
        encoder_threads: threads of one encoder call; more calls at once scale better than more threads.
        ef: a wider index search than the bundle's own; None or a lesser one takes the bundle's.
    """

    encoder_threads: int = Field(1, ge=1)
    ef: int | None = Field(None, ge=1)


# Columns of a bundle's phrases that are not the user's: two are answered by name, one is training's.
_OURS = ("id", "text", "train_clicks")


@dataclass(frozen=True)
class Timings:
    """Seconds that each step took for the whole call.

    Attributes:
        tokenise: normalising and tokenising.
        encode: the encoder.
        search: index search, exact-match lookup, merging and the two parts of the score.
    """

    tokenise: float = 0.0
    encode: float = 0.0
    search: float = 0.0

    def __add__(self, other: Timings) -> Timings:
        return Timings(self.tokenise + other.tokenise, self.encode + other.encode, self.search + other.search)


@dataclass(frozen=True)
class Matches:
    """The matches of n queries, in columns. Query i's are `offsets[i]:offsets[i + 1]`, best first.

    Attributes:
        offsets: int64 (n + 1).
        rows: int64 (m), rows of the bundle's phrases; no row twice for one query.
        scores: float32 (m), `encoder + classifier`, in -2..2.
        encoder: float32 (m), cosine of Φ_D of query and phrase.
        classifier: float32 (m), cosine of Φ_C of the query and the phrase's row of Ψ.
        exact: bool (m), the phrase's key equals the query's key ("exact"), else found by the index ("index").
        timings: what the steps took.
    """

    offsets: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    encoder: np.ndarray
    classifier: np.ndarray
    exact: np.ndarray
    timings: Timings

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Engine:
    """A verified bundle with its encoder and index in memory. Make one with `Engine.load`.

    Attributes:
        bundle: the bundle: `.manifest`, `.phrases` (Arrow table), `.vectors` (float32 (L, dim)).
    """

    def __init__(self, bundle: Bundle, settings: EngineSettings):
        self.bundle = bundle
        self._settings = settings
        self._encoder = QueryEncoder(bundle, threads=settings.encoder_threads)
        self._index = PhraseIndex(bundle)
        self._phrases = _one_chunk(bundle.phrases)
        self._keys = PhraseKeys(self._phrases.column("text"))
        self._vectors = np.asarray(bundle.vectors)  # a plain view: indexing np.memmap itself is slow

    @classmethod
    def load(cls, path: Path, settings: EngineSettings | None = None) -> Engine:
        """Verify the bundle at `path` and load it.

        Raises:
            DamagedError: the bundle is incomplete, altered or of an unknown version.
        """
        return cls(open_bundle(path), settings or EngineSettings())

    @property
    def bundle_id(self) -> str:
        """The bundle's version, which every answer carries."""
        return self.bundle.manifest.bundle_id

    def __len__(self) -> int:
        return self.bundle.phrases.num_rows

    @property
    def user_columns(self) -> pa.Schema:
        """The user's columns of the phrases, such as `match_type`."""
        return pa.schema([field for field in self._phrases.schema if field.name not in _OURS])

    def phrases(self, rows: np.ndarray) -> pa.Table:
        """The phrases' `id`, `text` and user columns, in the order of `rows` (int64)."""
        return self._phrases.take(pa.array(rows))

    def match(self, queries: list[str], k: int, min_score: float | None = None) -> Matches:
        """The k best phrases for each query.

        Phrases equal to the normalised query come first, whatever their score and `min_score`; the rest
        follow by score. A query that normalises to nothing has no matches.

        Args:
            queries: n texts, as typed.
            k: most matches for one query; more than there are phrases means all that the index finds.
            min_score: leave out phrases found by the index whose score is less.
        """
        if k < 1:
            raise ValueError(f"k is {k}, must be at least 1")
        n = len(queries)
        started = time.perf_counter()
        keys = [text.key(query) for query in queries]
        asked = np.flatnonzero(np.fromiter((key != "" for key in keys), bool, n))
        if not len(asked):
            return _nothing(n)
        keys = [keys[i] for i in asked]
        ids, mask = self._encoder.tokenise(keys)
        tokenised = time.perf_counter()
        vectors = self._encoder.run(ids, mask)
        encoded = time.perf_counter()
        found, _ = self._index.search(vectors, min(k, len(self)), ef=self._settings.ef)
        positions, rows, exact = _merge(found, *self._keys.find(keys))
        encoder, classifier = self._parts(vectors, positions, rows)
        scores = encoder + classifier
        keep = _best(positions, rows, scores, exact, k, min_score)
        offsets = np.zeros(n + 1, np.int64)
        offsets[asked + 1] = np.bincount(positions[keep], minlength=len(asked))
        np.cumsum(offsets, out=offsets)
        timings = Timings(tokenised - started, encoded - tokenised, time.perf_counter() - encoded)
        return Matches(
            offsets, rows[keep], scores[keep], encoder[keep], classifier[keep], exact[keep], timings
        )

    def _parts(
        self, vectors: np.ndarray, positions: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Both cosines of each (query position, phrase row): the two halves of the inner product."""
        half = vectors.shape[1] // 2
        products = vectors[positions] * self._vectors[rows]
        # Rounding puts the cosine of equal vectors a little above 1.
        return (
            np.clip(products[:, :half].sum(1), -1.0, 1.0),
            np.clip(products[:, half:].sum(1), -1.0, 1.0),
        )


def _one_chunk(table: pa.Table) -> pa.Table:
    """The table in memory, one chunk a column: taking a few rows of a chunked column costs milliseconds."""
    # 64-bit offsets, for beyond 2 GiB a string column could not be one chunk.
    fields = [
        field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)).combine_chunks()


def _nothing(n: int) -> Matches:
    empty = np.empty(0, np.float32)
    return Matches(
        np.zeros(n + 1, np.int64), np.empty(0, np.int64), empty, empty, empty, np.empty(0, bool), Timings()
    )


def _merge(
    found: np.ndarray, exact_positions: np.ndarray, exact_rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Index results (n, k; -1 = nothing) and exact matches as (positions, rows, exact), no pair twice."""
    positions, columns = np.nonzero(found >= 0)
    rows = found[positions, columns]
    exact = np.zeros(len(rows), bool)
    if len(exact_rows):
        positions = np.concatenate([exact_positions, positions])
        rows = np.concatenate([exact_rows, rows])
        exact = np.concatenate([np.ones(len(exact_rows), bool), exact])
        # np.unique keeps each pair's first place, and the exact ones stand in front.
        _, first = np.unique(np.stack([positions, rows]), axis=1, return_index=True)
        positions, rows, exact = positions[first], rows[first], exact[first]
    return positions, rows, exact


def _best(
    positions: np.ndarray,
    rows: np.ndarray,
    scores: np.ndarray,
    exact: np.ndarray,
    k: int,
    min_score: float | None,
) -> np.ndarray:
    """Indices of what is answered, by query, exact ones first, then by falling score, at most k a query."""
    order = np.lexsort((rows, -scores, ~exact, positions))
    if min_score is not None:
        order = order[exact[order] | (scores[order] >= min_score)]
    ordered = positions[order]
    rank = np.arange(len(order)) - np.searchsorted(ordered, ordered, side="left")
    return order[rank < k]
