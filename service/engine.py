"""A loaded bundle that matches queries to phrases: tokenise, encode, search, re-score. It starts no threads.

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
from bidmatch.base.errors import ConfigError
from export.bundle.encoder import QueryEncoder, QueryVectors
from export.bundle.format import depth_of
from export.bundle.index import PhraseIndex
from export.bundle.read import Bundle, open_bundle
from export.bundle.relevance import Relevance
from export.bundle.rescore import Rescorer
from export.bundle.weights import narrow_weights
from service.pairs import Pairs, found_pairs, join
from service.phrase_keys import PhraseKeys


class EngineSettings(BaseModel):
    """How an engine uses the machine.

    Attributes:
        encoder_threads: threads of one encoder call; more calls at once scale better than more threads.
        ef: a wider index search than the bundle's own; None or a lesser one takes the bundle's.
        rescore: whether what the index finds is re-scored with the bundle's wide vectors; None: where it has
            some.
        candidates: phrases that are re-scored for a query, or k where that is more; None for the bundle's
            own numbers. Counts for nothing where nothing is re-scored.
    """

    encoder_threads: int = Field(1, ge=1)
    ef: int | None = Field(None, ge=1)
    rescore: bool | None = None
    candidates: int | None = Field(None, ge=1)


NO_CALIBRATION = (
    "the bundle has no calibration that fits its answers, so their relevance is not known (one of re-scored "
    "answers fits only while re-scoring is on)"
)
# Columns of a bundle's phrases that are not the user's: two are answered by name, one is training's.
_OURS = ("id", "text", "train_clicks")


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
class Matches:
    """The matches of n queries, in columns. Query i's are `offsets[i]:offsets[i + 1]`, best first.

    Attributes:
        offsets: int64 (n + 1).
        rows: int64 (m), rows of the bundle's phrases; no row twice for one query.
        scores: float32 (m), `encoder + classifier`, in -2..2.
        encoder: float32 (m), weighted cosine of Φ_D of query and phrase; 0 where the model has no such head.
        classifier: float32 (m), weighted cosine of Φ_C of the query and the phrase's row of Ψ; likewise.
        relevance: float32 (m), how likely the phrase was clicked in the log, in 0..1; None where there is no
            calibration.
        exact: bool (m), the phrase's key equals the query's key ("exact"), else found by the index ("index").
        timings: what the steps took.
    """

    offsets: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    encoder: np.ndarray
    classifier: np.ndarray
    relevance: np.ndarray | None
    exact: np.ndarray
    timings: Timings

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Engine:
    """A verified bundle with its encoder and index in memory. Make one with `Engine.load`.

    Attributes:
        bundle: the bundle: `.manifest`, `.phrases` (Arrow table), `.vectors` (float32 (L, dim)).
        candidates: least number of phrases that are re-scored for a query; 0: nothing is.
        calibration: from scores to relevance; None where the bundle has none, or has one of re-scored answers
            and nothing is re-scored.

    Raises:
        ConfigError: re-scoring is asked for, and the bundle has no wide vectors.
    """

    def __init__(self, bundle: Bundle, settings: EngineSettings):
        self.bundle = bundle
        self._settings = settings
        self._encoder = QueryEncoder(bundle, threads=settings.encoder_threads)
        self._index = PhraseIndex(bundle)
        self._phrases = _one_chunk(bundle.phrases)
        self._keys = PhraseKeys(bundle.lookups.keys, self._phrases.column("text"))
        self._vectors = np.asarray(bundle.vectors)  # a plain view: indexing np.memmap itself is slow
        self._rescorer, self.candidates, self._per_match = _rescoring(bundle, settings)
        self._weights = narrow_weights(bundle.manifest.blend)
        record = bundle.manifest.calibration
        fits = bundle.wide is None or self._rescorer is not None
        self.calibration = None if record is None or not fits else Relevance(record)

    @classmethod
    def load(cls, path: Path, settings: EngineSettings | None = None) -> Engine:
        """Verify the bundle at `path` and load it.

        Raises:
            DamagedError: the bundle is incomplete, altered or of an unknown version.
            ConfigError: re-scoring is asked for, and the bundle has no wide vectors.
        """
        return cls(open_bundle(path), settings or EngineSettings())

    @property
    def bundle_id(self) -> str:
        """The bundle's version, which every answer carries."""
        return self.bundle.manifest.bundle_id

    def __len__(self) -> int:
        return self.bundle.phrases.num_rows

    def least_score(self, min_score: float | None, min_relevance: float | None) -> float | None:
        """The `min_score` that leaves out what either bound leaves out.

        Raises:
            ConfigError: a least relevance is given, and there is no calibration.
        """
        if min_relevance is None:
            return min_score
        if self.calibration is None:
            raise ConfigError(NO_CALIBRATION, hint="Ask for a least score instead.")
        least = self.calibration.least_score(min_relevance)
        return least if min_score is None else max(least, min_score)

    @property
    def user_columns(self) -> pa.Schema:
        """The user's columns of the phrases, such as `match_type`."""
        return pa.schema([field for field in self._phrases.schema if field.name not in _OURS])

    def phrases(self, rows: np.ndarray) -> pa.Table:
        """The phrases' `id`, `text` and user columns, in the order of `rows` (int64)."""
        return self._phrases.take(pa.array(rows))

    def depth(self, k: int) -> int:
        """Phrases that the index is searched for when k are asked for; all of them are re-scored, if any."""
        return min(depth_of(k, self.candidates, self._per_match), len(self))

    def match(self, queries: list[str], k: int, min_score: float | None = None) -> Matches:
        """The k best phrases for each query.

        The index is searched with the narrow vectors. Where the bundle re-scores, it is searched for
        `depth(k)` phrases; they and the exact matches get their scores from the wide vectors, and order,
        `min_score` and what is answered go by these.

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
            return _nothing(n, calibrated=self.calibration is not None)
        keys = [keys[i] for i in asked]
        ids, mask = self._encoder.tokenise(keys)
        tokenised = time.perf_counter()
        vectors = self._encoder.run(ids, mask)
        encoded = time.perf_counter()
        found = self._index.search(vectors.narrow, self.depth(k), ef=self._settings.ef).rows
        same_positions, same_rows = self._keys.find(keys)
        searched = time.perf_counter()
        encoder, classifier = self._scores(vectors, found)
        same = self._same(vectors, same_positions, same_rows)
        scored = time.perf_counter()
        pairs = join(same, found_pairs(found, encoder, classifier, k, min_score)).best(k)
        offsets = np.zeros(n + 1, np.int64)
        offsets[asked + 1] = np.bincount(pairs.positions, minlength=len(asked))
        np.cumsum(offsets, out=offsets)
        rescore = scored - searched if self._rescorer else 0.0
        search = time.perf_counter() - encoded - rescore
        timings = Timings(tokenised - started, encoded - tokenised, search, rescore)
        scores = pairs.encoder + pairs.classifier
        return Matches(
            offsets,
            pairs.rows,
            scores,
            pairs.encoder,
            pairs.classifier,
            None if self.calibration is None else self.calibration.of(scores),
            pairs.exact,
            timings,
        )

    def _same(self, vectors: QueryVectors, positions: np.ndarray, rows: np.ndarray) -> Pairs:
        """The exact matches with their scores: rows of phrases, int64 (m), of the queries in `positions`."""
        none = np.empty(0, np.float32)
        if not len(rows):
            return Pairs(positions, rows, none, none, np.empty(0, bool))
        encoder, classifier = self._scores(vectors.of(positions), rows[:, None])
        return Pairs(positions, rows, encoder[:, 0], classifier[:, 0], np.ones(len(rows), bool))

    def _scores(self, vectors: QueryVectors, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both parts of the score of n queries and their phrases, rows int64 (n, c): float32 (n, c) each."""
        if self._rescorer is not None:
            return self._rescorer.score(vectors.wide, rows)
        split = self.bundle.manifest.encoder_dim
        products = vectors.narrow[:, None] * self._vectors[rows]
        # Rounding puts the cosine of equal vectors a little above 1.
        w_d, w_c = self._weights
        return (
            np.clip(products[..., :split].sum(-1), -w_d, w_d),
            np.clip(products[..., split:].sum(-1), -w_c, w_c),
        )


def _rescoring(bundle: Bundle, settings: EngineSettings) -> tuple[Rescorer | None, int, int]:
    """What re-scores, least number of candidates, and the number a match; (None, 0, 1) where nothing does."""
    record = bundle.manifest.rescore
    if bundle.wide is None or record is None:
        if settings.rescore:
            raise ConfigError(
                f"{bundle.path} has no wide vectors to re-score with",
                hint="Export a run that was trained with wide heads (`--set wide_dim=512`).",
            )
        return None, 0, 1
    if settings.rescore is False:
        return None, 0, 1
    if settings.candidates is not None:
        return Rescorer(bundle.wide), settings.candidates, 1
    return Rescorer(bundle.wide), record.candidates, record.per_match


def _one_chunk(table: pa.Table) -> pa.Table:
    """The table in memory, one chunk a column: taking a few rows of a chunked column costs milliseconds."""
    # 64-bit offsets, for beyond 2 GiB a string column could not be one chunk.
    fields = [
        field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)).combine_chunks()


def _nothing(n: int, *, calibrated: bool) -> Matches:
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
