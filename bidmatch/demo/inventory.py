"""The phrases of the simulated log, each derived from its number: nothing is stored, whatever their count.

An intent is a product with, or without, a brand, up to four attribute values and a purpose. Which of these
it has is its shape; the intents of a shape are the first few of a permutation of all its combinations. An
intent has 1 to 8 phrases that mean the same: other names for its parts, another order, words such as "cheap"
or "near me" around them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.errors import ConfigError
from bidmatch.demo.vocabulary import Vocabulary, vocabulary

# Phrases of the intents i, i + 1, ..., repeating.
PHRASES_OF_INTENT = np.array([3, 5, 1, 8, 2, 4, 6, 3])
_PERIOD = len(PHRASES_OF_INTENT)
_PER_PERIOD = int(PHRASES_OF_INTENT.sum())
_BEFORE = np.concatenate([[0], np.cumsum(PHRASES_OF_INTENT)[:-1]])

# The parts of an intent, and so the columns of `Inventory.parts`.
PRODUCT, BRAND, VALUES, PURPOSE, N_PARTS = 0, 1, slice(2, 6), 6, 7
# The columns of a text, in its plainest order: front, brand, four values, product, purpose, back.
FRONT, BRAND_WORD, VALUE_WORDS, PRODUCT_WORD, PURPOSE_WORD, BACK, N_WORDS = 0, 1, slice(2, 6), 6, 7, 8, 9
ORDERS = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 7, 6, 5, 4, 3, 2, 1, 8],
        [0, 6, 1, 2, 3, 4, 5, 7, 8],
        [0, 2, 3, 4, 5, 1, 7, 6, 8],
    ]
)
# A phrase's frame: (order, front concept or -1, back concept or -1). An intent that is a product alone looks
# the same in every order, so its frames differ in the words around it.
_FRAMES = np.array(
    [
        [[0, -1, -1], [0, 0, -1], [0, -1, 0], [0, 1, -1], [0, -1, 1], [0, 2, -1]],
        [[0, -1, -1], [1, -1, -1], [0, 0, -1], [1, -1, 0], [0, -1, 2], [1, 1, -1]],
    ]
)
_N_FRAMES = _FRAMES.shape[1]
# Share of the intents that have 0, 1, ... parts beside the product, as far as there are so many.
_SHARE_OF_LEVEL = np.array([0.06, 0.24, 0.36, 0.24, 0.08, 0.015, 0.005])


def mixed(seed: int, numbers: np.ndarray, salt: int) -> np.ndarray:
    """Hash of each number, uint64 (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        start = np.uint64((seed * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03) & (2**64 - 1))
        x = (numbers.astype(np.uint64) + start) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Inventory:
    """All intents and phrases of one simulated log.

    Attributes:
        n_phrases: number of phrases, numbered from 0.
        n_intents: number of intents, numbered from 0, shape by shape.
        seed: seed of the log.
        has: bool (shapes, N_PARTS): which parts the intents of each shape have.
        radix: int64 (N_PARTS,): how many products, brands of a category, values of a group and purposes are
            in use.
        size: int64 (shapes,): combinations of each shape.
        start: int64 (shapes + 1,): first intent of each shape.
        step: int64 (shapes,): intent j of a shape is combination (step · j + shift) mod size.
        unstep: int64 (shapes,): inverse of step.
        shift: int64 (shapes,).
        words: the vocabulary.
    """

    n_phrases: int
    n_intents: int
    seed: int
    has: np.ndarray
    radix: np.ndarray
    size: np.ndarray
    start: np.ndarray
    step: np.ndarray
    unstep: np.ndarray
    shift: np.ndarray
    words: Vocabulary

    def phrases_of(self, intents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First phrase and number of phrases of each intent, int64."""
        first = intents // _PERIOD * _PER_PERIOD + _BEFORE[intents % _PERIOD]
        return first, np.minimum(PHRASES_OF_INTENT[intents % _PERIOD], self.n_phrases - first)

    def intent_of(self, phrases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Intent of each phrase, and which of its phrases it is, int64."""
        period, within = np.divmod(phrases, _PER_PERIOD)
        slot = np.searchsorted(_BEFORE, within, side="right") - 1
        return period * _PERIOD + slot, within - _BEFORE[slot]

    def parts(self, intents: np.ndarray) -> np.ndarray:
        """What each intent is made of: int64 (n, N_PARTS), -1 for a part it does not have.

        Columns: product, brand (of the product's category), a value of each of the category's groups,
            purpose.
        """
        shape = np.searchsorted(self.start, intents, side="right") - 1
        code = (self.step[shape] * (intents - self.start[shape]) + self.shift[shape]) % self.size[shape]
        out = np.empty((len(intents), N_PARTS), dtype=np.int64)
        for part in range(N_PARTS):
            has = self.has[shape, part]
            code, digit = np.divmod(code, np.where(has, self.radix[part], 1))
            out[:, part] = np.where(has, digit, -1)
        return out

    def find(self, parts: np.ndarray) -> np.ndarray:
        """The intent made of the given parts, int64 (n,); -1 where the log has no such intent."""
        has = parts >= 0
        shape = (has @ (1 << np.arange(N_PARTS))) >> 1
        code = np.zeros(len(parts), dtype=np.int64)
        for part in reversed(range(N_PARTS)):
            code = np.where(has[:, part], code * self.radix[part] + parts[:, part], code)
        shape = self._row_of_mask[shape]
        j = (code - self.shift[shape]) * self.unstep[shape] % self.size[shape]
        found = j < self.start[shape + 1] - self.start[shape]
        return np.where(found, self.start[shape] + j, -1)

    @property
    def _row_of_mask(self) -> np.ndarray:
        """Row of `has` for each set of optional parts, read as a binary number."""
        masks = self.has[:, 1:] @ (1 << np.arange(N_PARTS - 1))
        return np.argsort(masks)

    def words_of(self, parts: np.ndarray, choice: np.ndarray, names: np.ndarray) -> np.ndarray:
        """Pool strings that name the parts: int32 (n, N_WORDS), -1 for none; no words in front or behind yet.

        Args:
            parts: (n, N_PARTS).
            choice: uint64 (n, N_PARTS), which name of each part, modulo how many it has.
            names: (concepts,) how many names of each concept may be used.
        """
        words = self.words
        out = np.full((len(parts), N_WORDS), -1, dtype=np.int32)
        category = words.category[parts[:, PRODUCT]]
        concepts = np.full((len(parts), N_PARTS), -1, dtype=np.int64)
        concepts[:, PRODUCT] = words.products[parts[:, PRODUCT]]
        concepts[:, BRAND] = words.brands[category, parts[:, BRAND]]
        for group in range(VALUES.start, VALUES.stop):
            concepts[:, group] = words.values[category, group - VALUES.start, parts[:, group]]
        concepts[:, PURPOSE] = words.purposes[parts[:, PURPOSE]]
        named = words.first[concepts] + (choice % names[concepts].astype(np.uint64)).astype(np.int32)
        named = np.where(parts >= 0, named, -1)
        out[:, PRODUCT_WORD] = named[:, PRODUCT]
        out[:, BRAND_WORD] = named[:, BRAND]
        out[:, VALUE_WORDS] = named[:, VALUES]
        out[:, PURPOSE_WORD] = named[:, PURPOSE]
        return out

    def phrase_texts(self, phrases: np.ndarray) -> pa.Array:
        """Text of each phrase, an Arrow string array. No two phrases have the same text."""
        words = self.words
        intents, which = self.intent_of(phrases)
        parts = self.parts(intents)
        # Phrase v of an intent takes the v-th of a walk over all (product name, frame): its step shares no
        # factor with their number, so no two phrases of an intent meet.
        names = words.bid_names[words.products[parts[:, PRODUCT]]].astype(np.int64)
        ways = names * _N_FRAMES
        start = (mixed(self.seed, intents, 1) % ways.astype(np.uint64)).astype(np.int64)
        step = np.array([7, 11, 13, 17])[(mixed(self.seed, intents, 2) % np.uint64(4)).astype(np.int64)]
        way = (start + which * step) % ways
        choice = np.stack([mixed(self.seed, phrases, 10 + part) for part in range(N_PARTS)], axis=1)
        choice[:, PRODUCT] = way // _N_FRAMES
        ids = self.words_of(parts, choice, words.bid_names)
        frame = _FRAMES[(parts[:, 1:] >= 0).any(axis=1).astype(int), way % _N_FRAMES]
        for column, concepts, salt in ((FRONT, words.front, 3), (BACK, words.back, 4)):
            concept = concepts[frame[:, 1 if column == FRONT else 2]]
            some = (mixed(self.seed, phrases, salt) % words.bid_names[concept].astype(np.uint64)).astype(
                np.int32
            )
            used = frame[:, 1 if column == FRONT else 2] >= 0
            ids[:, column] = np.where(used, words.first[concept] + some, -1)
        return self.texts(ids, frame[:, 0])

    def texts(self, ids: np.ndarray, order: np.ndarray) -> pa.Array:
        """Join words to texts.

        Args:
            ids: int32 (n, N_WORDS) pool strings, -1 for none.
            order: (n,) rows of ORDERS.
        """
        ids = np.take_along_axis(ids, ORDERS[order], axis=1)
        columns = [self.words.pool.take(pa.array(column, mask=column < 0)) for column in ids.T]
        return pc.binary_join_element_wise(*columns, " ", null_handling="skip")


def inventory(n_phrases: int, seed: int) -> Inventory:
    """Lay out the intents and phrases of a log.

    Few phrases use few products, brands and values, so that each is seen often enough to be learnt from.

    Raises:
        ConfigError: fewer than one phrase, or more than the word lists make.
    """
    if n_phrases < 1:
        raise ConfigError(f"a log needs at least one phrase, not {n_phrases}")
    words = vocabulary()
    n_intents = n_phrases // _PER_PERIOD * _PERIOD
    n_intents += int(np.searchsorted(_BEFORE, n_phrases % _PER_PERIOD))
    radix = np.array(
        [
            np.clip(round(1.5 * n_intents**0.5), 20, len(words.products)),
            np.clip(round(0.85 * n_intents**0.27), 2, words.brands.shape[1]),
            *[np.clip(round(1.15 * n_intents**0.2), 2, words.values.shape[2])] * (VALUES.stop - VALUES.start),
            len(words.purposes),
        ],
        dtype=np.int64,
    )
    masks = np.arange(1 << (N_PARTS - 1))
    has = np.concatenate(
        [np.ones((len(masks), 1), bool), (masks[:, None] >> np.arange(N_PARTS - 1) & 1).astype(bool)], axis=1
    )
    has = has[np.argsort(has.sum(axis=1), kind="stable")]
    size = np.where(has, radix, 1).prod(axis=1)
    if n_intents > size.sum():
        most = int(size.sum()) // _PERIOD * _PER_PERIOD
        raise ConfigError(f"the word lists make no more than {most:,} phrases, not {n_phrases:,}")
    counts = _share_out(n_intents, has.sum(axis=1) - 1, size)
    rng = np.random.default_rng([seed, 0])
    step = np.array([_coprime(int(n), rng) for n in size])
    return Inventory(
        n_phrases=n_phrases,
        n_intents=n_intents,
        seed=seed,
        has=has,
        radix=radix,
        size=size,
        start=np.concatenate([[0], np.cumsum(counts)]),
        step=step,
        unstep=np.array([pow(int(s), -1, int(n)) if n > 1 else 0 for s, n in zip(step, size, strict=True)]),
        shift=rng.integers(0, size),
        words=words,
    )


def _share_out(n_intents: int, level: np.ndarray, size: np.ndarray) -> np.ndarray:
    """How many intents each shape gets: by its level's share, never more than it has; sums to n_intents."""
    weight = _SHARE_OF_LEVEL[level] / np.bincount(level)[level]
    counts = np.zeros(len(size), dtype=np.int64)
    while (left := n_intents - int(counts.sum())) > 0:
        open_weight = np.where(counts < size, weight, 0.0)
        more = np.floor(left * open_weight / open_weight.sum()).astype(np.int64)
        if not more.any():
            more[np.flatnonzero(counts < size)[:left]] = 1
        counts = np.minimum(counts + more, size)
    return counts


def _coprime(n: int, rng: np.random.Generator) -> int:
    """A number that shares no factor with n, near the golden section of n: its multiples are well spread."""
    candidate = max(int(n * (0.618 + 0.02 * rng.random())), 1)
    while np.gcd(candidate, n) != 1:
        candidate += 1
    return candidate
