"""The words of a text, one text or a whole column at a time, and numbers for words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.text import key
from export.bundle import lookup


def words(text: str) -> list[str]:
    """The words of a text, of whatever case."""
    return lookup.words(key(text))


@lru_cache(maxsize=1 << 16)
def joined(text: str) -> str:
    """The words of a text with one space between; no word holds a space."""
    return " ".join(words(text))


def joined_array(texts: pa.Array) -> pa.Array:
    """`joined` of each text (no nulls), as `large_string`; ASCII never enters Python."""
    texts = texts.cast(pa.large_string())
    spaced = pc.replace_substring_regex(pc.ascii_lower(texts), pattern=r"\W+", replacement=" ")
    plain = pc.ascii_trim(spaced, characters=" ")
    other = pc.invert(pc.string_is_ascii(texts))
    if not pc.any(other, min_count=0).as_py():
        return plain
    rest = [" ".join(words(text)) for text in texts.filter(other).to_pylist()]
    return pc.replace_with_mask(plain, other, pa.array(rest, pa.large_string()))


@dataclass(frozen=True)
class Split:
    """The words of n texts; text i's are `codes[offsets[i]:offsets[i + 1]]`.

    Attributes:
        offsets: int64 (n + 1).
        codes: int32 (m), each word's place in `distinct`.
        distinct: large_string array of the distinct words.
    """

    offsets: np.ndarray
    codes: np.ndarray
    distinct: pa.Array


def split(texts: pa.Array) -> Split:
    """The words of each text (no nulls)."""
    lists = pc.split_pattern(joined_array(texts), pattern=" ")
    encoded = lists.flatten().dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    counts = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    # A text without words splits into one empty string.
    empty = pc.index(encoded.dictionary, "").as_py()
    if empty >= 0:
        wordless = codes == empty
        counts = counts - np.bincount(
            np.repeat(np.arange(len(counts)), counts)[wordless], minlength=len(counts)
        )
        codes = codes[~wordless]
    return Split(np.r_[0, np.cumsum(counts, dtype=np.int64)], codes, encoded.dictionary)


class Vocabulary:
    """Numbers the words of a fixed list: 8 bytes a word beside its text.

    Args:
        distinct: V different words, as `large_string`.
    """

    def __init__(self, distinct: pa.Array):
        hashes = lookup.hash_texts(distinct.to_pylist())
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._places = order.astype(np.int32)
        self._words = distinct

    def __len__(self) -> int:
        return len(self._hashes)

    def numbers(self, asked: Sequence[str]) -> list[int]:
        """Each word's place in the list, or -1 for a word that isn't in it."""
        if not len(self) or not asked:
            return [-1] * len(asked)
        hashes = lookup.hash_texts(asked)
        first = np.searchsorted(self._hashes, hashes)
        there = self._hashes[np.minimum(first, len(self) - 1)] == hashes
        numbers = [-1] * len(asked)
        hits = np.flatnonzero(there)
        held = self._words.take(pa.array(self._places[first[hits]])).to_pylist()
        for at, place, word in zip(hits.tolist(), first[hits].tolist(), held, strict=True):
            same = word == asked[at]
            numbers[at] = int(self._places[place]) if same else self._later(asked[at], place)
        return numbers

    def _later(self, word: str, place: int) -> int:
        """The word's number among those after `place` whose hash collides with the one there, or -1."""
        hash_ = self._hashes[place]
        for other in range(place + 1, len(self)):
            if self._hashes[other] != hash_:
                break
            number = int(self._places[other])
            if self._words[number].as_py() == word:
                return number
        return -1
