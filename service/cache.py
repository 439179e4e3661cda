"""Whole answers, kept while they are right: the latest used, bounded in bytes.

An answer is dropped when a change of the live phrases could change it, and not before: when a phrase leaves
that is in it; when one comes that equals the query, or whose score reaches the answer's last one. For that
each answer has a guard: the query's vector in 8 bits, its last score, and a filter of the ids that are in it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.bundle import _native
from service._native import id_filter
from service.options import MatchOptions

# Beside the bytes of an answer and of what was asked: objects, the slot.
_ENTRY_BYTES = 400
# Beside what 8 bits lose: scores of one pair, added up in another order, differ by less than this.
_ROUNDING = 1e-4
_LARGEST_STEP = 1 / 127
# Products that checking new phrases against all guards may cost; beyond it, all answers are dropped.
_MOST_PRODUCTS = 500_000_000
_PAIRS_AT_ONCE = 1_000_000
_FILTER_WORDS = 4
_NO_WEIGHT = 1e9

Key = tuple[str, MatchOptions]


@dataclass(frozen=True, slots=True)
class Guard:
    """When an answer is no longer right.

    Attributes:
        vector: int8 (dim,), the query's vector that answers are ordered by.
        scales: float32 (2,), of its two parts.
        last: the score of the answer's last match; -inf where there was room for more.
        ids: uint64 (4,), a Bloom filter of the matches' ids.
        version: of the live phrases that were searched.
    """

    vector: np.ndarray
    scales: np.ndarray
    last: float
    ids: np.ndarray
    version: int


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer in the cache: JSON of its matches, how many they are, the score of the best, see `Answer`."""

    matches: bytes
    count: int
    best: float


@dataclass(frozen=True)
class _Guards:
    """The guards of n answers, see `Guard`: a row each. `split` is the width of the Φ_D part."""

    vectors: np.ndarray
    scales: np.ndarray
    last: np.ndarray
    ids: np.ndarray
    split: int

    def may_hold(self, id: str) -> np.ndarray:
        """Whether a phrase may be in each answer: bool (n,)."""
        mine = id_filter([id])
        held: np.ndarray = (self.ids & mine == mine).all(axis=1)
        return held

    def reached(self, phrases: np.ndarray) -> np.ndarray:
        """Whether the score of some phrase, float32 (m, dim), may reach each answer's last: bool (n,)."""
        rows = np.broadcast_to(np.arange(len(self.last)), (len(phrases), len(self.last)))
        encoder, classifier = _native.score_wide(
            phrases,
            np.ascontiguousarray(rows),
            self.vectors,
            self.scales,
            split=self.split,
            encoder_weight=_NO_WEIGHT,
            classifier_weight=_NO_WEIGHT,
        )
        reached: np.ndarray = (encoder + classifier + self._lost(phrases) >= self.last - _ROUNDING).any(
            axis=0
        )
        return reached

    def _lost(self, phrases: np.ndarray) -> np.ndarray:
        """By how much a score of phrase and query may be above that of phrase and guard: float32 (m, n).

        Each number in 8 bits is off by half a step at most: those of the query here, and those of the phrase
        where answers are ordered by such.
        """
        lost = np.zeros((len(phrases), len(self.last)), np.float32)
        for part, columns in enumerate((slice(0, self.split), slice(self.split, None))):
            sizes = np.abs(phrases[:, columns])
            steps = sizes.max(axis=1, initial=0.0) * _LARGEST_STEP
            # The query's part has length 1, so its magnitudes add up to the root of its width at most.
            root = np.float32(sizes.shape[1] ** 0.5)
            lost += 0.5 * (sizes.sum(axis=1)[:, None] * self.scales[:, part] + steps[:, None] * root)
        return lost


class AnswerCache:
    """The answers of one bundle. Safe to use from several threads at once.

    Args:
        max_bytes: most bytes of all answers; 0 keeps none.
        dim: width of the guards' vectors.
        split: width of their Φ_D part.

    Attributes:
        nbytes: bytes of what is kept, roughly.
    """

    def __init__(self, max_bytes: int, dim: int, split: int):
        self._max_bytes, self._dim, self._split = max_bytes, dim, split
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[Kept, int, int]] = OrderedDict()
        self._key_of: list[Key | None] = []
        self._free: list[int] = []
        self._of_query: dict[str, set[int]] = {}
        self._vectors = np.zeros((0, dim), np.int8)
        self._scales = np.zeros((0, 2), np.float32)
        self._last = np.zeros(0, np.float32)
        self._ids = np.zeros((0, _FILTER_WORDS), np.uint64)
        self._version = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def on(self) -> bool:
        """Whether anything is ever kept."""
        return self._max_bytes > 0

    def get(self, query: str, options: MatchOptions) -> Kept | None:
        """The answer to a query, by its key (see `bidmatch.base.text.key`)."""
        key = (query, options)
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, query: str, options: MatchOptions, answer: Kept, guard: Guard) -> None:
        """Keep an answer unless phrases changed since its search began; the least recently used make room."""
        size = len(answer.matches) + 2 * len(query) + options.size() + self._dim + _ENTRY_BYTES
        if size > self._max_bytes:
            return
        key = (query, options)
        with self._lock:
            if guard.version < self._version:
                return
            if key in self._entries:
                self._drop(key)
            slot = self._free.pop() if self._free else self._new_slot()
            self._vectors[slot], self._scales[slot] = guard.vector, guard.scales
            self._last[slot], self._ids[slot] = guard.last, guard.ids
            self._key_of[slot] = key
            self._of_query.setdefault(query, set()).add(slot)
            self._entries[key] = (answer, slot, size)
            self.nbytes += size
            while self.nbytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def changed(self, version: int, keys: Sequence[str], vectors: np.ndarray, gone: Sequence[str]) -> int:
        """Live phrases changed: drop the answers that may be wrong now. Returns how many.

        Args:
            version: of the live phrases after the change.
            keys: keys of the phrases that came.
            vectors: float32 (m, dim), theirs, as they are scored.
            gone: ids of the phrases that left.
        """
        with self._lock:
            # From here on no answer is kept that was searched before the change.
            self._version = max(self._version, version)
            count = len(self._key_of)
            if not self._entries:
                return 0
            if len(vectors) * count * self._dim > _MOST_PRODUCTS:
                dropped = len(self._entries)
                self._clear()
                return dropped
            guards = _Guards(
                self._vectors[:count],
                self._scales[:count],
                self._last[:count],
                self._ids[:count],
                self._split,
            )
            wrong = np.zeros(count, bool)
            for key in keys:
                wrong[list(self._of_query.get(key, ()))] = True
        # Meanwhile others get and put. A slot that gets a newer answer now may lose it for nothing.
        for one in gone:
            wrong |= guards.may_hold(one)
        at_once = max(1, _PAIRS_AT_ONCE // count)
        for start in range(0, len(vectors), at_once):
            wrong |= guards.reached(np.ascontiguousarray(vectors[start : start + at_once], np.float32))
        dropped = 0
        with self._lock:
            for slot in np.flatnonzero(wrong).tolist():
                key_of = self._key_of[slot]
                if key_of is not None:
                    self._drop(key_of)
                    dropped += 1
        return dropped

    def _drop(self, key: Key) -> None:
        _, slot, size = self._entries.pop(key)
        self._key_of[slot] = None
        slots = self._of_query[key[0]]
        slots.discard(slot)
        if not slots:
            del self._of_query[key[0]]
        self._free.append(slot)
        self.nbytes -= size

    def _clear(self) -> None:
        self._entries.clear()
        self._of_query.clear()
        self._free = list(range(len(self._key_of)))
        self._key_of = [None] * len(self._key_of)
        self.nbytes = 0

    def _new_slot(self) -> int:
        slot = len(self._key_of)
        self._key_of.append(None)
        if slot == len(self._last):
            more = max(256, 2 * slot)
            for name in ("_vectors", "_scales", "_last", "_ids"):
                old = getattr(self, name)
                new = np.zeros((more, *old.shape[1:]), old.dtype)
                new[:slot] = old
                setattr(self, name, new)
        return slot
