"""A loaded bundle that matches queries to phrases: tokenise, encode, search, re-score. It starts no threads.

What the HTTP service and offline scoring both run. Everything may be called from several threads at once:
tokenizer, ONNX Runtime and the searches release the GIL and share no state between calls.

Rows number the phrases: those of the bundle from 0 to L - 1, live ones from L on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field

from bidmatch.base import text
from bidmatch.base.errors import ConfigError
from export.bundle.encoder import CPU, QueryEncoder, QueryVectors, pad
from export.bundle.format import depth_of
from export.bundle.index import Index, IndexUnavailableError, PhraseIndex
from export.bundle.milvus import MilvusIndex
from export.bundle.milvus_client import MilvusAccess
from export.bundle.read import Bundle, open_bundle
from export.bundle.relevance import Relevance
from export.bundle.rescore import Rescorer
from export.bundle.weights import narrow_weights
from service._native import Renderer
from service.cost import EncodeCost
from service.live.columns import to_table, with_rules
from service.live.phrases import BundlePhrases, LivePhrases, VectorShape
from service.live.store import PhraseRow
from service.matches import Encoded, Matches, Timings, no_matches
from service.options import MatchOptions
from service.phrase_keys import PhraseIds, PhraseKeys
from service.phrase_table import PhraseTable
from service.rules.bought import PhraseRuns
from service.rules.negatives import NEGATIVE_KEYWORDS, Negatives
from service.scope import Scopes
from service.search import Search
from service.tails import Tails


class EngineSettings(BaseModel):
    """How an engine uses the machine.

    Attributes:
        encoder_threads: threads of one encoder call; more calls at once scale better than more threads.
        ef: a wider index search than the bundle's own; None or a lesser one takes the bundle's.
        rescore: whether what the index finds is re-scored with the bundle's wide vectors; None: where it has
            some.
        candidates: phrases that are re-scored for a query, or k where that is more; None for the bundle's
            own numbers. Counts for nothing where nothing is re-scored.
        honour_match_types: whether match types and negative keywords are honoured.
        provider: what encodes: `cpu`, `cuda` (refused where there is none) or `auto`, which takes CUDA where
            it works.
        milvus: how Milvus is reached, for bundles whose index is there.
    """

    encoder_threads: int = Field(1, ge=1)
    ef: int | None = Field(None, ge=1)
    rescore: bool | None = None
    candidates: int | None = Field(None, ge=1)
    honour_match_types: bool = True
    provider: Literal["auto", "cpu", "cuda"] = "cpu"
    milvus: MilvusAccess = Field(default_factory=MilvusAccess.offline)


NO_CALIBRATION = (
    "the bundle has no calibration that fits its answers, so their relevance is not known (one of re-scored "
    "answers fits only while re-scoring is on)"
)
_SAMPLED = 16
# Columns of a bundle's phrases that are not the user's: two are answered by name, one is training's.
_OURS = ("id", "text", "train_clicks")


class Engine:
    """A verified bundle with its encoder and index in memory. Make one with `Engine.load`.

    Attributes:
        bundle: the bundle: `.manifest`, `.phrases` (Arrow table), `.vectors` (float32 (L, dim)).
        index: finds the phrases nearest to a vector.
        candidates: least number of phrases that are re-scored for a query; 0: nothing is.
        calibration: from scores to relevance; None where the bundle has none, or has one of re-scored answers
            and nothing is re-scored.
        cost: what encoding costs, by which queries of a call are grouped; None until `measure` finds out.
        live: the live phrases; None: there are none. Set by one thread while others match.
        made: when the bundle was made, Unix time in milliseconds.
        serves: `serves(row, live phrase)`: whether the bundle's phrase stands for a live one of its id.

    Raises:
        ConfigError: re-scoring is asked for, and the bundle has no wide vectors; or the provider is not
            there.
    """

    def __init__(self, bundle: Bundle, settings: EngineSettings):
        self.bundle = bundle
        self.settings = settings
        self.encoder = QueryEncoder.on(bundle, settings.provider, threads=settings.encoder_threads)
        self.index: Index = (
            PhraseIndex(bundle) if bundle.manifest.milvus is None else MilvusIndex(bundle, settings.milvus)
        )
        self.table = bundle.phrases
        self.keys = PhraseKeys(bundle.lookups.keys, self.table.column("text"))
        self.ids = PhraseIds(bundle.lookups.ids, self.table.column("id"))
        self._column_names = self.user_columns.names
        users = self.table.select(self._column_names)
        self.scopes = Scopes(_with_rules(users), self.ids, honour_match_types=settings.honour_match_types)
        self.runs = PhraseRuns(bundle.lookups.runs, self.table.column("text"))
        self.negatives = Negatives(_column(users, NEGATIVE_KEYWORDS) if settings.honour_match_types else None)
        self._vectors = np.asarray(bundle.vectors)  # a plain view: indexing np.memmap itself is slow
        self._rescorer, self.candidates, self._per_match = _rescoring(bundle, settings)
        self._weights = narrow_weights(bundle.manifest.blend)
        record = bundle.manifest.calibration
        fits = bundle.wide is None or self._rescorer is not None
        self.calibration = None if record is None or not fits else Relevance(record)
        self.cost: EncodeCost | None = None
        # A call on one processor works on the calling thread alone, whose own time no other work disturbs.
        alone = self.encoder.providers[0] == CPU[0] and settings.encoder_threads == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self.live: LivePhrases | None = None
        # Live phrases keep it, and would keep all of a bundle that is no longer served, were it a method.
        self.made = round(1e3 * datetime.fromisoformat(bundle.manifest.created).timestamp())
        self.serves = partial(_serves, self.table, self.user_columns, self.made)
        self._tails = Tails(self.named(None).columns, len(self))
        self._renderer = Renderer(*_buffers(self.table["id"]), *_buffers(self.table["text"]))

    @classmethod
    def load(cls, path: Path, settings: EngineSettings | None = None) -> Engine:
        """Verify the bundle at `path` and load it.

        Raises:
            DamagedError: the bundle is incomplete, altered or of an unknown version.
            ConfigError: re-scoring is asked for, and the bundle has no wide vectors; or the provider is not
                there.
        """
        return cls(open_bundle(path), settings or EngineSettings())

    @property
    def bundle_id(self) -> str:
        """The bundle's version, which every answer carries."""
        return self.bundle.manifest.bundle_id

    def __len__(self) -> int:
        return self.bundle.phrases.num_rows

    def measure(self, before: Engine | None = None) -> None:
        """Warm everything up and find out what encoding costs here, tenths of a second for a transformer.

        Where the index does not answer, nothing is found out.

        Args:
            before: an engine that knows; its costs are this one's, too, where their encoders are alike.
        """
        try:
            self.match(["warm up"], 10)
        except IndexUnavailableError:
            return  # what encoding costs stays unknown
        if before is not None and before.cost is not None and before._encoder_kind == self._encoder_kind:
            self.cost = before.cost
            return
        # Phrases of the bundle are like queries, and no two searches take the same way.
        rows = np.random.default_rng(0).integers(max(1, len(self)), size=min(_SAMPLED, len(self)))
        samples = self.table["text"].take(pa.array(rows)).to_pylist()

        def encode(texts: Sequence[str]) -> tuple[int, float]:
            ids, mask = self.encoder.tokenise(texts)
            started = self._clock()
            self.encoder.run(ids, mask)
            return ids.shape[1], self._clock() - started

        def match(queries: Sequence[str]) -> float:
            started = self._clock()
            self.match(queries, 10)
            return self._clock() - started

        cost = EncodeCost()
        cost.calibrate(samples or ["warm up"], encode, match)
        self.cost = cost

    @property
    def _encoder_kind(self) -> tuple[object, ...]:
        """What calls of the encoder cost by: trained anew, it costs the same."""
        model, encoder = self.bundle.manifest.model, self.encoder
        return model.kind, model.name, encoder.precision, encoder.dim, encoder.wide_dim, *encoder.providers

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
        return pa.schema([field for field in self.table.schema if field.name not in _OURS])

    @property
    def phrase_columns(self) -> pa.Schema:
        """The columns that can be filtered by and that live phrases can have."""
        return self.scopes.columns.schema

    def phrases(self, rows: np.ndarray) -> pa.Table:
        """The `id`, `text` and user columns of the bundle's phrases, in the order of `rows` (int64)."""
        return self.table.take(pa.array(rows))

    def named(self, live: LivePhrases | None) -> PhraseTable:
        """Ids, texts and columns by row, of the bundle's phrases and of live ones, which were searched."""
        return PhraseTable(self.table, live, self._column_names)

    def rendered(self, found: Matches) -> tuple[list[bytes], np.ndarray, np.ndarray]:
        """Matches as JSON, a list for each query; see `service._native.Renderer.render`."""
        live, rows = found.live, found.rows
        beyond = [] if live is None else (rows[rows >= len(self)] - len(self)).tolist()
        return self._renderer.render(
            found.offsets,
            rows,
            found.scores,
            found.encoder,
            found.classifier,
            relevance=found.relevance,
            exact=found.exact,
            others=[live.shown[row] for row in beyond] if live is not None else [],
            tails=self._tails.of(rows) if self._column_names else None,
        )

    def depth(self, k: int) -> int:
        """Phrases that index and live graph are each searched for when k are asked for.

        All of them are re-scored, if any.
        """
        most = len(self) + (0 if self.live is None else self.live.view.limit)
        return min(depth_of(k, self.candidates, self._per_match), most)

    def new_live(self) -> LivePhrases:
        """An empty set of live phrases that fits this bundle; put it into `live`."""
        manifest = self.bundle.manifest
        wide = self.bundle.wide if self._rescorer is not None else None
        shape = VectorShape(
            manifest.dim,
            manifest.encoder_dim,
            self._weights,
            *((wide.rows.shape[1], wide.encoder_dim, wide.weights) if wide is not None else ()),
        )
        return LivePhrases(
            shape,
            self.phrase_columns,
            BundlePhrases(len(self), self.ids.find, self.serves),
            honour_match_types=self.settings.honour_match_types,
        )

    def encode(self, queries: Sequence[str]) -> Encoded:
        """Tokenise and encode n queries, those of like lengths together."""
        started = time.perf_counter()
        n = len(queries)
        keys = [text.key(query) for query in queries]
        asked = np.flatnonzero(np.fromiter((key != "" for key in keys), bool, n))
        keys = [keys[i] for i in asked.tolist()]
        tokens = self.encoder.token_ids(keys)
        tokenised = time.perf_counter()
        vectors = self._encode(tokens)
        return Encoded(n, asked, keys, vectors, tokenised - started, time.perf_counter() - tokenised)

    def _encode(self, tokens: Sequence[Sequence[int]]) -> QueryVectors:
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        cost = self.cost
        groups = [np.arange(len(tokens))] if cost is None or len(tokens) < 2 else cost.groups(lengths)
        parts = []
        for group in groups:
            ids, mask = pad([tokens[i] for i in group.tolist()])
            started = self._clock()
            parts.append(self.encoder.run(ids, mask))
            if cost is not None and len(group):
                cost.observe(len(group), ids.shape[1], self._clock() - started)
        if len(parts) == 1:
            back = np.argsort(groups[0])
            return parts[0].of(back) if len(back) > 1 else parts[0]
        back = np.argsort(np.concatenate(groups))
        return QueryVectors(
            np.concatenate([part.narrow for part in parts])[back],
            np.concatenate([part.wide for part in parts])[back],
        )

    def match(self, queries: Sequence[str], k: int, min_score: float | None = None) -> Matches:
        """`find` with these options alone."""
        return self.find(self.encode(queries), MatchOptions(k, min_score))

    def find(self, queries: Encoded, options: MatchOptions) -> Matches:
        """The k best phrases for each query.

        The index is searched with the narrow vectors. Where the bundle re-scores, it is searched for
        `depth(k)` phrases; they and the exact matches get their scores from the wide vectors, and order,
        `min_score` and what is answered go by these.

        Phrases equal to the normalised query come first, whatever their score and `min_score`; the rest
        follow by score. A query that normalises to nothing has no matches. What the options or the way
        phrases were bought rule out is left out before k is counted.

        Args:
            queries: n queries, encoded.
            options: what is asked of all of them.
        """
        k = options.k
        if k < 1:
            raise ValueError(f"k is {k}, must be at least 1")
        started = time.perf_counter()
        asked = queries.asked
        if not len(asked):
            return no_matches(queries.count, calibrated=self.calibration is not None)
        search = Search(self, queries, options)
        pairs = search.best()
        offsets = np.zeros(queries.count + 1, np.int64)
        offsets[asked + 1] = np.bincount(pairs.positions, minlength=len(asked))
        np.cumsum(offsets, out=offsets)
        scores = pairs.encoder + pairs.classifier
        relevance = None if self.calibration is None else self.calibration.of(scores)
        whole = time.perf_counter() - started
        timings = Timings(
            queries.tokenise, queries.encode, whole - search.rescore_seconds, search.rescore_seconds
        )
        return Matches(
            offsets,
            pairs.rows,
            scores,
            pairs.encoder,
            pairs.classifier,
            relevance,
            pairs.exact,
            timings,
            search.live,
        )

    def find_each(
        self, queries: Sequence[str], options: Sequence[MatchOptions]
    ) -> Iterator[tuple[np.ndarray, MatchOptions, Encoded, Matches]]:
        """`find` for n queries with options of their own, encoded together.

        Yields:
            Places in `queries` (int64), their options, the queries, their matches.
        """
        encoded = self.encode(queries)
        groups: dict[MatchOptions, list[int]] = {}
        for at, one in enumerate(options):
            groups.setdefault(one, []).append(at)
        if len(groups) == 1:
            yield np.arange(len(queries)), options[0], encoded, self.find(encoded, options[0])
            return
        for one, places in groups.items():
            part = encoded.of(np.array(places, np.int64))
            yield np.array(places, np.int64), one, part, self.find(part, one)

    def scores_of(
        self, vectors: QueryVectors, rows: np.ndarray, live: LivePhrases | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Both parts of the scores of n queries and their phrases, rows int64 (n, c), -1 for none: (n, c)."""
        count = len(self)
        if live is None or not len(rows) or not (rows >= count).any():
            return self._bundle_scores(vectors, rows)
        ours, theirs = np.where(rows < count, rows, -1), np.where(rows < count, -1, rows - count)
        encoder, classifier = self._bundle_scores(vectors, ours)
        live_encoder, live_classifier = live.score(vectors, theirs)
        return encoder + live_encoder, classifier + live_classifier

    def _bundle_scores(self, vectors: QueryVectors, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._rescorer is not None:
            return self._rescorer.score(vectors.wide, rows)
        split = self.bundle.manifest.encoder_dim
        products = vectors.narrow[:, None] * self._vectors[np.maximum(rows, 0)]
        products[rows < 0] = 0
        # Rounding puts the cosine of equal vectors a little above 1.
        w_d, w_c = self._weights
        return (
            np.clip(products[..., :split].sum(-1), -w_d, w_d),
            np.clip(products[..., split:].sum(-1), -w_c, w_c),
        )

    def scored_vectors(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of some of the bundle's phrases that answers are ordered by: float32 (n, dim)."""
        wide = self.bundle.wide
        if self._rescorer is None or wide is None:
            return self._vectors[rows]
        scales = np.repeat(
            wide.scales[rows], [wide.encoder_dim, wide.rows.shape[1] - wide.encoder_dim], axis=1
        )
        return np.asarray(wide.rows[rows] * scales, np.float32)

    @property
    def score_split(self) -> int:
        """Width of the Φ_D part of the vectors that answers are ordered by."""
        manifest = self.bundle.manifest
        if self._rescorer is not None and manifest.rescore is not None:
            return manifest.rescore.encoder_dim
        return manifest.encoder_dim

    @property
    def score_dim(self) -> int:
        """Width of the vectors that answers are ordered by."""
        return self.bundle.manifest.dim if self._rescorer is None else self._rescorer.dim

    @property
    def rescores(self) -> bool:
        """Whether what the index finds is scored again with wide vectors."""
        return self._rescorer is not None


def _serves(table: pa.Table, columns: pa.Schema, made: int, row: int, phrase: PhraseRow) -> bool:
    """Whether the bundle's phrase stands for a live one of its id: says the same, or was made after it."""
    if phrase.edited <= made:
        return True
    (_, (held,), (there,)) = PhraseTable(table, None, columns.names).take(np.array([row]))
    # As the bundle would hold them: a float32 is not the number that was given.
    (given,) = to_table([phrase.columns], with_rules(columns)).to_pylist()
    given = {name: value for name, value in given.items() if value is not None}
    return text.normalise(held) == phrase.text and there == given


def _buffers(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Where each text begins and ends, int64 (L + 1), and the bytes of all, uint8, without copying them."""
    texts = (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    )
    _, offsets, data = texts.cast(pa.large_string()).buffers()
    if not len(texts):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64, len(texts) + 1, 8 * texts.offset)
    return ends, np.frombuffer(data if data is not None else b"", np.uint8)


def _column(table: pa.Table, name: str) -> pa.ChunkedArray | None:
    return table[name] if name in table.column_names else None


def _with_rules(users: pa.Table) -> pa.Table:
    """The user's columns, and empty ones of how phrases were bought, which live phrases may have."""
    for field in with_rules(users.schema):
        if field.name not in users.column_names:
            users = users.append_column(field, pa.nulls(users.num_rows, field.type))
    return users


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
