"""How matches are found: by words, by the index, among live phrases; under all rules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bidmatch.base import text
from export.bundle.index import Denied, Found
from service.live.phrases import View
from service.matches import Encoded
from service.options import MatchOptions
from service.pairs import Pairs, both, found_pairs, join
from service.phrase_table import PhraseTable
from service.rules.words import words

if TYPE_CHECKING:
    from service.engine import Engine

_NO_ROWS = np.empty(0, np.int64)
_NO_BITS = np.empty(0, np.uint8)
_NOTHING = np.empty(0, np.float32)
# How much deeper a search goes at a time where phrases of one text took each other's places.
_DEEPER = 4
# The narrowest search of the live graph.
_LEAST_WIDTH = 32


class Search:
    """One search: what it looks at stays the same from its beginning to its end.

    Args:
        engine: the bundle and the live phrases.
        queries: n queries with their vectors.
        options: what is asked of all of them.

    Attributes:
        live: the live phrases.
        rescore_seconds: what re-scoring has taken so far.
    """

    def __init__(self, engine: Engine, queries: Encoded, options: MatchOptions):
        self._engine, self._options = engine, options
        self._keys, self._vectors = queries.keys, queries.vectors
        self._scope = engine.scopes.of(options)
        self.live = live = engine.live
        self._view = View(0, _NO_BITS, None) if live is None else live.view
        self._off = self._view.bundle_off
        honour = engine.settings.honour_match_types
        live_words = live is not None and self._view.limit > 0 and live.reads_words
        self._words: list[list[str]] | None = None
        if honour and (len(engine.runs) or len(engine.negatives) or live_words):
            self._words = [words(key) for key in queries.keys]
        self._denied = self._bundle_denied()
        self._live_scope = self._scope_of_live()
        self.rescore_seconds = 0.0

    def best(self) -> Pairs:
        """The k best pairs of each query, best first."""
        engine, options = self._engine, self._options
        named = self._by_words()
        depth = engine.depth(options.k)
        while True:
            found, unseen = self._by_search(depth)
            pairs = join(named, found)
            if not options.distinct:
                return pairs.best(options.k)
            pairs = self._distinct(pairs.best(len(pairs.rows) + 1)).best(options.k)
            if not (unseen > self._last(pairs)).any():
                return pairs
            depth = min(_DEEPER * depth, len(engine) + self._view.limit)

    def _last(self, pairs: Pairs) -> np.ndarray:
        """The score that another phrase must have to be one of the best of each query: float32 (n,)."""
        counts = np.bincount(pairs.positions, minlength=len(self._keys))
        last = np.full(len(self._keys), -np.inf, np.float32)
        full = counts >= self._options.k
        ends = np.cumsum(counts)[full] - 1
        scores = pairs.encoder[ends] + pairs.classifier[ends]
        last[full] = np.where(pairs.exact[ends], np.inf, scores)
        return last

    def _by_search(self, depth: int) -> tuple[Pairs, np.ndarray]:
        """What the bundle's index and the live graph give, and what the others may score at most, by query.

        That is float32 (n,), -inf where there are no others that could be returned; empty unless it matters,
        for answers of distinct texts.
        """
        engine, options, vectors = self._engine, self._options, self._vectors
        rows, encoder, classifier = engine.index.search(
            vectors.narrow,
            depth,
            ef=engine.settings.ef,
            admitted=self._scope.searched,
            off=self._off,
            denied=self._denied,
        )
        ours, limit = rows.shape[1], self._view.limit
        if self.live is not None and limit:
            allowed, denied = self._live_scope
            live = self.live.search(
                vectors.narrow,
                min(depth, limit),
                self._live_width(),
                self._view,
                allowed=allowed,
                denied=denied,
                first=len(engine),
            )
            rows = np.concatenate([rows, live.rows], axis=1)
            encoder = np.concatenate([encoder, live.encoder], axis=1)
            classifier = np.concatenate([classifier, live.classifier], axis=1)
        if engine.rescores:
            encoder, classifier = self._rescored(rows)
        if not options.distinct:
            return found_pairs(rows, encoder, classifier, options.k, options.min_score), _NOTHING
        scores = encoder + classifier
        unseen = self._unseen(rows[:, :ours], scores[:, :ours], ours == depth < len(engine))
        if limit:
            unseen = np.maximum(unseen, self._unseen(rows[:, ours:], scores[:, ours:], depth < limit))
        return found_pairs(rows, encoder, classifier, rows.shape[1], options.min_score), unseen

    def _live_width(self) -> int:
        """The ef of the live graph's search: less than the bundle's, as fewer of the best are live ones.

        The root of the share that they have of all phrases has the recall that the bundle's has at its ef,
        measured at a tenth and a half of all. Where a filter leaves few of them, all of it is needed.
        """
        engine, limit = self._engine, self._view.limit
        whole = engine.index.width(engine.settings.ef)
        allowed, _ = self._live_scope
        if allowed is not None:
            return whole
        return max(_LEAST_WIDTH, math.ceil(whole * math.sqrt(limit / (limit + len(engine)))))

    def _unseen(self, rows: np.ndarray, scores: np.ndarray, more: bool) -> np.ndarray:
        """What phrases beyond those found may score: no more than the least of these.

        Args:
            rows: int64 (n, c), those found, -1 for none.
            scores: float32 (n, c), theirs.
            more: whether there are others at all.
        """
        least = scores.min(axis=1)
        some = (rows[:, -1] >= 0) & more
        if self._options.min_score is not None:
            some &= least >= self._options.min_score
        return np.where(some, least, -np.inf)

    def recall(self) -> tuple[int, int]:
        """See `index_recall`."""
        engine, k, vectors = self._engine, self._options.k, self._vectors.narrow
        search = partial(
            engine.index.search, ef=engine.settings.ef, admitted=self._scope.searched, off=self._off
        )
        exact = partial(engine.index.exact, admitted=self._scope.searched, off=self._off)
        found = _scores(search(vectors, engine.depth(k), denied=self._denied))
        best = _scores(exact(vectors, k, denied=self._denied))
        limit = self._view.limit
        if self.live is not None and limit:
            allowed, denied = self._live_scope
            width = self._live_width()
            live = partial(self.live.search, ef=width, view=self._view, allowed=allowed, denied=denied)
            found = np.append(found, _scores(live(vectors, min(engine.depth(k), limit))))
            best = np.append(best, _scores(live(vectors, min(k, limit), exactly=True)))
        best = np.sort(best)[::-1][:k]
        if not len(best):
            return 0, 0
        # Which of those that score the same are found does not matter.
        return min(len(best), int((found >= best[-1]).sum())), len(best)

    def _rescored(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        started = time.perf_counter()
        scores = self._engine.scores_of(self._vectors, rows, self.live)
        self.rescore_seconds += time.perf_counter() - started
        return scores

    def _by_words(self) -> Pairs:
        """The phrases that equal a query, and those bought as `phrase` whose words it contains."""
        engine = self._engine
        positions, rows = engine.keys.find(self._keys)
        same = self._admitted(positions, rows, exact=True)
        if self._words is None:
            runs = same.take(np.empty(0, np.int64))
        else:
            runs = self._admitted(*engine.runs.find(self._words), exact=False)
        if self.live is not None and self._view.limit:
            same = both(same, self._live_admitted(*self.live.same_key(self._keys, self._view), exact=True))
            if self._words is not None:
                found = self.live.runs(self._words, self._view)
                runs = both(runs, self._live_admitted(*found, exact=False))
        if self._options.min_score is not None and len(runs.rows):
            runs = runs.take(runs.encoder + runs.classifier >= self._options.min_score)
        return join(same, runs)

    def _admitted(self, positions: np.ndarray, rows: np.ndarray, *, exact: bool) -> Pairs:
        if len(rows):
            keep = self._scope.admits(rows)
            if self._off is not None:
                keep &= (self._off[rows >> 3] >> (rows & 7) & 1) == 0
            if self._denied is not None:
                keep &= ~_denies(self._denied, positions, rows)
            positions, rows = positions[keep], rows[keep]
        return self._scored(positions, rows, exact=exact)

    def _live_admitted(self, positions: np.ndarray, rows: np.ndarray, *, exact: bool) -> Pairs:
        allowed, denied = self._live_scope
        if len(rows):
            keep = np.ones(len(rows), bool)
            if allowed is not None:
                keep &= (allowed[rows >> 3] >> (rows & 7) & 1) == 1
            if denied is not None:
                keep &= ~_denies(denied, positions, rows)
            positions, rows = positions[keep], rows[keep]
        return self._scored(positions, rows + len(self._engine), exact=exact)

    def _scored(self, positions: np.ndarray, rows: np.ndarray, *, exact: bool) -> Pairs:
        if not len(rows):
            none = np.empty(0, np.float32)
            return Pairs(_NO_ROWS, _NO_ROWS, none, none, np.empty(0, bool))
        encoder, classifier = self._engine.scores_of(self._vectors.of(positions), rows[:, None], self.live)
        return Pairs(positions, rows, encoder[:, 0], classifier[:, 0], np.full(len(rows), exact))

    def _distinct(self, pairs: Pairs) -> Pairs:
        """The first pair of each query and text, of pairs in their order."""
        texts = PhraseTable(self._engine.table, self.live, ()).texts(pairs.rows)
        seen: set[tuple[int, str]] = set()
        keep = np.zeros(len(texts), bool)
        for at, (position, phrase) in enumerate(zip(pairs.positions.tolist(), texts, strict=True)):
            one = (position, text.key(phrase))
            keep[at] = one not in seen
            seen.add(one)
        return pairs.take(keep)

    def _bundle_denied(self) -> Denied | None:
        blocked = self._engine.negatives.blocked if len(self._engine.negatives) else None
        return self._denied_rows(blocked, self._scope.denied)

    def _denied_rows(
        self, blocked: Callable[[list[str]], np.ndarray] | None, always: np.ndarray
    ) -> Denied | None:
        if blocked is None or self._words is None:
            if not len(always):
                return None
            parts = [always] * len(self._keys)
        else:
            parts = [blocked(spoken) for spoken in self._words]
            if len(always):
                parts = [np.union1d(always, part).astype(np.int32) for part in parts]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return Denied(offsets, np.concatenate(parts)) if offsets[-1] else None

    def _scope_of_live(self) -> tuple[np.ndarray | None, Denied | None]:
        """Bits of the live rows that filter and allow list let pass; rows that are denied, by query."""
        live, options, limit = self.live, self._options, self._view.limit
        if live is None or not limit:
            return None, None
        allowed: np.ndarray | None = None
        if options.filter:
            allowed = live.columns.select(options.filter).mask()[:limit]
        if options.allow is not None:
            listed = np.zeros(limit, bool)
            listed[live.rows_of(options.allow, self._view)] = True
            allowed = listed if allowed is None else listed & allowed
        denied = np.sort(live.rows_of(options.deny, self._view)).astype(np.int32)
        blocked = live.negatives.blocked if self._words is not None and live.negatives.some else None
        bits = None if allowed is None else np.packbits(allowed, bitorder="little")
        return bits, self._denied_rows(blocked, denied)


def _scores(found: Found) -> np.ndarray:
    """The scores of what was found for one query: float32 (c,)."""
    return found.scores[0][found.rows[0] >= 0]


def _denies(denied: Denied, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether each pair is denied: bool (m,)."""
    return np.fromiter(
        (
            row in denied.rows[denied.offsets[position] : denied.offsets[position + 1]]
            for position, row in zip(positions.tolist(), rows.tolist(), strict=True)
        ),
        bool,
        len(rows),
    )


def index_recall(engine: Engine, query: str, options: MatchOptions) -> tuple[int, int]:
    """How many of exact search's k best a search through index and live graph finds, and how many there are.

    Of phrases that are found by search, under the same rules; what the query's words lead to is always found.
    """
    encoded = engine.encode([query])
    if not len(encoded.asked):
        return 0, 0
    return Search(engine, encoded, options).recall()
