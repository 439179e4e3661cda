"""The live phrases of one worker, in memory, beside a bundle's: found from when they are applied.

One thread applies changes and links rows into the graph; any number of threads search meanwhile. Rows are
only ever appended: a changed phrase gets a new row and its old one is switched off. What is to be seen is a
`View` that never changes; the next one takes its place in one step. A search keeps the one it began with, so
it sees a phrase before a change or after it, never twice or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from bidmatch.base import text
from export.bundle import _native
from export.bundle.encoder import QueryVectors
from export.bundle.index import Denied, Found, pack
from export.bundle.lookup import BROAD, MATCH_TYPE, PHRASE, match_type_code
from export.bundle.rescore import to_8_bits
from service.live.columns import to_table
from service.live.store import PhraseRow
from service.rules.bought import GrowingRuns
from service.rules.columns import GrowingColumns
from service.rules.negatives import NEGATIVE_KEYWORDS, GrowingNegatives
from service.tails import tail_of

_M, _EF_CONSTRUCTION, _SEED = 16, 100, 100
_LEAST_ROWS = 1024
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class VectorShape:
    """The vectors of a bundle's phrases: widths, where the Φ_D part ends, and how much each part counts.

    Attributes:
        dim: width of the vectors that are searched.
        split: width of their Φ_D part.
        weights: (w_D, w_C).
        wide_dim: width of the vectors that re-score; 0 where nothing does.
        wide_split: width of their Φ_D part.
        wide_weights: (w_D, w_C) of these.
    """

    dim: int
    split: int
    weights: tuple[float, float]
    wide_dim: int = 0
    wide_split: int = 0
    wide_weights: tuple[float, float] = (1.0, 1.0)

    def weighted(self, vectors: np.ndarray) -> np.ndarray:
        """[w_D Φ_D(z) ⊕ w_C N(Φ_C(z))] from the encoder's [Φ_D(z) ⊕ N(Φ_C(z))], float32 (n, dim)."""
        return _weighted(vectors, self.split, self.weights)

    def weighted_wide(self, vectors: np.ndarray) -> np.ndarray:
        """The same of the wide vectors."""
        return _weighted(vectors, self.wide_split, self.wide_weights)


def _weighted(vectors: np.ndarray, split: int, weights: tuple[float, float]) -> np.ndarray:
    factors = np.repeat(np.asarray(weights, np.float32), [split, vectors.shape[1] - split])
    return np.ascontiguousarray(vectors * factors, np.float32)


@dataclass(frozen=True)
class BundlePhrases:
    """What live phrases must know of the bundle's.

    Attributes:
        count: how many there are, L.
        rows: the row of each id that the bundle holds.
        serves: whether the bundle's row says what a live phrase of the same id says, so that it is used.
    """

    count: int
    rows: Any
    serves: Any


@dataclass(frozen=True, slots=True)
class View:
    """What a search sees.

    Attributes:
        limit: rows before this one.
        off: bits of those that are no longer returned, at least `limit` of them.
        bundle_off: bits of the bundle's rows that are paused, removed or replaced by live ones; None: no row.
    """

    limit: int
    off: np.ndarray
    bundle_off: np.ndarray | None

    def is_off(self, row: int) -> bool:
        """Whether a row before `limit` is no longer returned."""
        return _is_set(self.off, row)

    def bundle_row_is_off(self, row: int) -> bool:
        """Whether a row of the bundle is paused, removed or replaced."""
        return self.bundle_off is not None and _is_set(self.bundle_off, row)


def _is_set(bits: np.ndarray, row: int) -> bool:
    return bool(bits[row >> 3] >> (row & 7) & 1)


def _switch(bits: np.ndarray, row: int, *, off: bool) -> None:
    bit = np.uint8(1 << (row & 7))
    bits[row >> 3] = bits[row >> 3] | bit if off else bits[row >> 3] & ~bit


class LivePhrases:
    """See the module.

    Args:
        shape: of the vectors.
        schema: the columns that phrases have, such as `match_type`.
        bundle: the phrases that these are added to.
        honour_match_types: whether match types are honoured: phrases that are not broad are then found by
            their words alone.

    Attributes:
        ids: by row, those of earlier states, too; likewise the next two.
        texts: see `ids`.
        columns_of: see `ids`.
        shown: by row, what a match says of the phrase: id, text and tail, see `service.tails`.
        columns: to be filtered by.
        negatives: negative keywords.
        view: what searches that begin now see.
        version: rises with each change, after it is in `view`.
        active: phrases that can be matched.
    """

    def __init__(
        self, shape: VectorShape, schema: pa.Schema, bundle: BundlePhrases, *, honour_match_types: bool
    ):
        self._shape, self._schema, self._bundle = shape, schema, bundle
        self._honour_match_types = honour_match_types
        self._graph = _native.LiveGraph(
            shape.dim,
            M=_M,
            ef_construction=_EF_CONSTRUCTION,
            seed=_SEED,
            split=shape.split,
            encoder_weight=shape.weights[0],
            classifier_weight=shape.weights[1],
        )
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.columns_of: list[Mapping[str, Any]] = []
        self.shown: list[tuple[str, str, bytes]] = []
        self._row_of: dict[str, int] = {}
        self._by_key: dict[str, list[int]] = {}
        self.columns = GrowingColumns(schema)
        self.negatives = GrowingNegatives()
        self._runs = GrowingRuns()
        # The row that a phrase had before one of its rows.
        self._earlier: dict[int, int] = {}
        self._wide = (
            np.zeros((_LEAST_ROWS, shape.wide_dim), np.int8),
            np.zeros((_LEAST_ROWS, 2), np.float32),
        )
        self.view = View(0, np.zeros(_LEAST_ROWS // 8, np.uint8), None)
        self.active = 0
        self.version = 0

    @property
    def unlinked(self) -> int:
        """Rows that searches compare one by one, as the graph does not hold them yet."""
        return len(self._graph) - self._graph.linked

    @property
    def wasted(self) -> int:
        """Rows that no search returns any more."""
        return self.view.limit - self.active

    @property
    def reads_words(self) -> bool:
        """Whether a query's words matter: some phrase has negative keywords, or was bought as `phrase`."""
        return self.negatives.some or bool(len(self._runs))

    def link(self, most: int) -> int:
        """Put up to so many rows into the graph; returns how many."""
        return self._graph.link(most)

    def apply(self, changes: Sequence[PhraseRow], vectors: QueryVectors) -> None:
        """Take over the latest state of some phrases, in the order of their changes.

        Args:
            changes: n phrases, none twice.
            vectors: the encoder's, of those texts that `wants_vector` (n', in their order).
        """
        held = self._bundle.rows([change.id for change in changes])
        placed = [change for change in changes if self._is_placed(change, held.get(change.id))]
        old_rows = {change.id: self.row_of(change.id) for change in changes}
        first = self._append(placed, vectors)
        end = first + len(placed)
        off = np.zeros(max(len(self.view.off), -(-len(self._wide[0]) // 8)), np.uint8)
        off[: len(self.view.off)] = self.view.off
        bundle_off = self.view.bundle_off
        if held:
            bundle_off = pack(np.zeros(self._bundle.count, bool)) if bundle_off is None else bundle_off.copy()
        new = {change.id: first + at for at, change in enumerate(placed)}
        for change in changes:
            old, row = old_rows[change.id], new.get(change.id)
            if old is not None:
                _switch(off, old, off=True)
            if row is not None:
                if change.id in self._row_of:
                    self._earlier[row] = self._row_of[change.id]
                self._row_of[change.id] = row
            bundle_row = held.get(change.id)
            if bundle_row is not None and bundle_off is not None:
                _switch(bundle_off, bundle_row, off=row is not None or change.state != "active")
            self.active += (row is not None) - (old is not None)
        self.view = View(end, off, bundle_off)
        self.version += 1

    def wants_vector(self, change: PhraseRow) -> bool:
        """Whether `apply` needs the vector of this phrase."""
        return self._is_placed(change, self._bundle.rows([change.id]).get(change.id))

    def _is_placed(self, change: PhraseRow, bundle_row: int | None) -> bool:
        if change.state != "active" or change.source != "live":
            return False
        return bundle_row is None or not self._bundle.serves(bundle_row, change)

    def _append(self, phrases: list[PhraseRow], vectors: QueryVectors) -> int:
        first = len(self.ids)
        if not phrases:
            return first
        end = first + len(phrases)
        texts = [str(phrase.text) for phrase in phrases]
        types = [match_type_code(phrase.columns.get(MATCH_TYPE)) for phrase in phrases]
        # What could fail comes before anything is changed: rows of all parts must stay the same.
        keys = [text.key(phrase) for phrase in texts]
        columns = to_table([phrase.columns for phrase in phrases], self._schema)
        weighted = self._shape.weighted(vectors.narrow)
        searched = [kind == BROAD or not self._honour_match_types for kind in types]
        tails = [tail_of(phrase.columns) for phrase in phrases]
        shown = list(zip([phrase.id for phrase in phrases], texts, tails, strict=True))
        self._grow(end)
        if self._shape.wide_dim:
            wide = self._shape.weighted_wide(vectors.wide)
            rows, scales = self._wide
            rows[first:end], scales[first:end] = to_8_bits(wide, self._shape.wide_split)
        self.ids += [phrase.id for phrase in phrases]
        self.texts += texts
        self.columns_of += [phrase.columns for phrase in phrases]
        self.shown += shown
        self.columns.extend(columns)
        self.negatives.extend([phrase.columns.get(NEGATIVE_KEYWORDS) for phrase in phrases])
        runs = [at for at, kind in enumerate(types) if kind == PHRASE]
        self._runs.extend([texts[at] for at in runs], [first + at for at in runs])
        for at, one in enumerate(keys):
            self._by_key.setdefault(one, []).append(first + at)
        self._graph.append(weighted, np.asarray(searched, np.uint8))
        return first

    def _grow(self, rows: int) -> None:
        have = len(self._wide[0])
        if rows <= have:
            return
        more = max(rows, 2 * have) - have
        wide, scales = self._wide
        # Both at once: a search that scores meanwhile must not meet the one without the other.
        self._wide = (np.pad(wide, ((0, more), (0, 0))), np.pad(scales, ((0, more), (0, 0))))

    def row_of(self, id: str) -> int | None:
        """The row of a phrase that can be matched, or None."""
        view = self.view
        row = self._row_in(view, id)
        return None if row is None or view.is_off(row) else row

    def _row_in(self, view: View, id: str) -> int | None:
        """The row that a phrase has in a view, or None; it may be off."""
        row = self._row_of.get(id)
        while row is not None and row >= view.limit:
            row = self._earlier.get(row)
        return row

    def nearest(self, vectors: np.ndarray, k: int) -> list[int]:
        """The rows nearest to one vector, float32 (1, dim), under no rule but their own state."""
        view = self.view
        if not view.limit:
            return []
        rows = self.search(vectors, min(k, view.limit), k, view, allowed=None, denied=None).rows[0]
        return [int(row) for row in rows if row >= 0]

    def holds(self, id: str) -> bool:
        """Whether a phrase of this id can be matched as a live one."""
        return self.row_of(id) is not None

    def scored(self, vectors: QueryVectors) -> np.ndarray:
        """What phrases with these vectors of the encoder are scored with, float32 (n, dim)."""
        if self._shape.wide_dim:
            return self._shape.weighted_wide(vectors.wide)
        return self._shape.weighted(vectors.narrow)

    def rows_of(self, ids: Sequence[str], view: View) -> np.ndarray:
        """The rows that the phrases of these ids have in a view, int64; some may be off."""
        found = (self._row_in(view, one) for one in ids)
        return np.array([row for row in found if row is not None], np.int64)

    def same_key(self, keys: Sequence[str], view: View) -> tuple[np.ndarray, np.ndarray]:
        """The rows whose key equals a query's: positions in `keys`, rows; int64 (m,) each."""
        pairs = [(at, row) for at, one in enumerate(keys) if one for row in self._by_key.get(one, ())]
        return self._on(pairs, view)

    def runs(self, words: Sequence[Sequence[str]], view: View) -> tuple[np.ndarray, np.ndarray]:
        """The rows bought as `phrase` whose words a query contains: positions, rows; int64 (m,) each."""
        positions, rows = self._runs.find(words)
        return self._on(list(zip(positions.tolist(), rows.tolist(), strict=True)), view)

    def _on(self, pairs: list[tuple[int, int]], view: View) -> tuple[np.ndarray, np.ndarray]:
        if not pairs:
            return _NO_ROWS, _NO_ROWS
        kept = [(at, row) for at, row in pairs if row < view.limit and not view.is_off(row)]
        columns = np.array(kept, np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def search(
        self,
        vectors: np.ndarray,
        k: int,
        ef: int,
        view: View,
        *,
        allowed: np.ndarray | None,
        denied: Denied | None,
        exactly: bool = False,
        first: int = 0,
    ) -> Found:
        """The k nearest rows of each vector, see `PhraseIndex.search`.

        Args:
            vectors: float32 (n, dim).
            k: at least 1.
            ef: width of the search.
            view: of what there is.
            allowed: bits of the rows that may be returned; None for all.
            denied: rows that may not, by query.
            exactly: compare all rows.
            first: what rows are numbered from.
        """
        found = self._graph.search(
            np.ascontiguousarray(vectors, np.float32),
            k,
            ef,
            view.limit,
            allowed=allowed,
            off=view.off,
            denied_offsets=None if denied is None else denied.offsets,
            denied_rows=None if denied is None else denied.rows,
            exactly=exactly,
            first=first,
        )
        return Found(*found)

    def score(self, vectors: QueryVectors, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both parts of the scores of rows, int64 (n, c), -1 for none, as answered: float32 (n, c) each."""
        if not self._shape.wide_dim:
            return self._graph.score(
                np.ascontiguousarray(vectors.narrow, np.float32), np.ascontiguousarray(rows)
            )
        wide, scales = self._wide
        return _native.score_wide(
            np.ascontiguousarray(vectors.wide, np.float32),
            np.ascontiguousarray(rows),
            wide,
            scales,
            split=self._shape.wide_split,
            encoder_weight=self._shape.wide_weights[0],
            classifier_weight=self._shape.wide_weights[1],
        )
