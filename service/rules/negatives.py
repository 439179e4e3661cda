"""Negative keywords: which phrases a query must not get."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.errors import ConfigError
from bidmatch.base.text import key
from export.bundle.lookup import words
from service.rules.ranges import in_order, places
from service.rules.selection import few
from service.rules.words import Vocabulary, split

NEGATIVE_KEYWORDS = "negative_keywords"

# ASCII that a key has none of at its ends.
_ENDS = r"[\x00-\x20\x7f]*"


class Kind(IntEnum):
    """When a negative keyword hits a query."""

    ALL = 0
    """All its words are in the query, in any order: `word word`."""
    RUN = 1
    """Its words stand in the query in this order, side by side: `"word word"`."""
    WHOLE = 2
    """Its words are the query's words, in this order: `[word word]`."""


_SIGNS = {('"', '"'): Kind.RUN, ("[", "]"): Kind.WHOLE}


def kind_of(text: str) -> Kind:
    """The kind that the notation of a keyword's key says; its words are those of the key, signs and all."""
    return _SIGNS.get((text[0], text[-1]), Kind.ALL) if len(text) > 1 else Kind.ALL


def _kinds(keywords: pa.Array) -> np.ndarray:
    """`kind_of` the key of each keyword (large_string, no nulls): uint8."""
    kinds = np.zeros(len(keywords), np.uint8)
    for kind, pattern in ((Kind.RUN, '".*"'), (Kind.WHOLE, r"\[.*\]")):
        found = pc.match_substring_regex(keywords, pattern=f"(?s)^{_ENDS}{pattern}{_ENDS}$")
        kinds[found.to_numpy(zero_copy_only=False)] = kind
    other = np.flatnonzero(~pc.string_is_ascii(keywords).to_numpy(zero_copy_only=False))
    kinds[other] = [kind_of(key(one)) for one in keywords.take(pa.array(other)).to_pylist()]
    return kinds


def keywords_of(value: str | Sequence[str | None] | None) -> list[str]:
    """The negative keywords in one phrase's column: of a text, what stands between commas."""
    if value is None:
        return []
    return value.split(",") if isinstance(value, str) else [one for one in value if isinstance(one, str)]


def _holds_run(run: Sequence[object], query: Sequence[object]) -> bool:
    size = len(run)
    return any(list(query[at : at + size]) == list(run) for at in range(len(query) - size + 1))


def _hits(kind: int, keyword: Sequence[object], query: Sequence[object]) -> bool:
    """Whether a keyword all of whose words are in the query hits it."""
    if kind == Kind.WHOLE:
        return list(keyword) == list(query)
    return kind == Kind.ALL or _holds_run(keyword, query)


class Negatives:
    """The negative keywords of L phrases.

    Each distinct keyword is read once, and filed under its rarest word: a query looks only at those filed
    under its own words. Takes 4 bytes for each keyword of each phrase, and some 30 and the text for each
    distinct keyword.

    Args:
        column: (L,) lists of texts, or texts with commas between the keywords; None: there are none.

    Raises:
        ConfigError: the column holds something else.
    """

    def __init__(self, column: pa.ChunkedArray | pa.Array | None):
        self._size = 0 if column is None else len(column)
        offsets, codes, distinct = _keywords(column)
        parts = split(distinct)
        lengths = np.diff(parts.offsets)
        wordy = np.flatnonzero(lengths)
        self._keywords = distinct.take(pa.array(wordy))
        self._kinds = _kinds(self._keywords)
        self._offsets = parts.offsets[np.r_[wordy, len(lengths)]].astype(np.int32)
        self._codes = parts.codes
        self._vocabulary = Vocabulary(parts.distinct)
        self._filed_offsets, self._filed = self._file()
        number = np.full(len(lengths), -1, np.int32)
        number[wordy] = np.arange(len(wordy), dtype=np.int32)
        self._row_offsets, self._rows = _inverted(offsets, number[codes], len(wordy))
        self._rows.flags.writeable = False

    def __len__(self) -> int:
        return self._size

    def _file(self) -> tuple[np.ndarray, np.ndarray]:
        """Each word's keywords: int32 (V + 1) offsets, int32 (K,) keywords."""
        count = len(self._keywords)
        commonness = np.bincount(self._codes, minlength=len(self._vocabulary))
        ranked = (commonness[self._codes] << 32) | self._codes
        rarest = (
            (np.minimum.reduceat(ranked, self._offsets[:-1]) & 0xFFFFFFFF) if count else np.empty(0, np.int64)
        )
        held = np.bincount(rarest, minlength=len(self._vocabulary))
        offsets = np.r_[0, np.cumsum(held)].astype(np.int32)
        return offsets, np.argsort(rarest, kind="stable").astype(np.int32)

    def _hitting(self, query: Sequence[str]) -> list[int]:
        """The keywords that hit the query."""
        numbers = self._vocabulary.numbers(query)
        known = np.array(sorted(set(numbers) - {-1}), np.int64)
        if not len(known):
            return []
        starts = self._filed_offsets[known]
        filed = self._filed[places(starts, self._filed_offsets[known + 1] - starts)]
        if not len(filed):
            return []
        starts = self._offsets[filed]
        sizes = self._offsets[filed + 1] - starts
        codes = self._codes[places(starts, sizes)]
        asked = known[np.minimum(np.searchsorted(known, codes), len(known) - 1)] == codes
        whole = np.logical_and.reduceat(asked, np.cumsum(sizes) - sizes)
        held = filed[whole]
        any_order = self._kinds[held] == Kind.ALL
        hitting: list[int] = held[any_order].tolist()
        for keyword in held[~any_order].tolist():
            spoken = self._codes[self._offsets[keyword] : self._offsets[keyword + 1]].tolist()
            if _hits(self._kinds[keyword], spoken, numbers):
                hitting.append(keyword)
        return hitting

    def _rows_of(self, keyword: int) -> np.ndarray:
        return self._rows[self._row_offsets[keyword] : self._row_offsets[keyword + 1]]

    def blocked(self, query: Sequence[str]) -> np.ndarray:
        """The rows that have a negative keyword which hits a query: int32, ascending, none twice.

        Args:
            query: the query's `words`.
        """
        return _union([self._rows_of(keyword) for keyword in self._hitting(query)], self._size)

    def hit(self, row: int, query: Sequence[str]) -> str | None:
        """A negative keyword of the row that hits the query, as it is written; None if none does."""
        for keyword in self._hitting(query):
            rows = self._rows_of(keyword)
            at = int(np.searchsorted(rows, row))
            if at < len(rows) and rows[at] == row:
                return str(self._keywords[keyword].as_py()).strip()
        return None


def _keywords(column: pa.ChunkedArray | pa.Array | None) -> tuple[np.ndarray, np.ndarray, pa.Array]:
    """Row i's keywords are `codes[offsets[i]:offsets[i + 1]]`, places in an array of distinct texts.

    Returns:
        int64 (L + 1), int32 (m,), large_string (K,).
    """
    nothing = pa.array([], pa.large_string())
    if column is None or pa.types.is_null(column.type):
        return np.zeros(1 + (0 if column is None else len(column)), np.int64), np.empty(0, np.int32), nothing
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    counts, flat = [np.zeros(1, np.int64)], [nothing]
    for chunk in chunks:
        lists = _lists(chunk)
        counts.append(pc.fill_null(pc.list_value_length(lists), 0).to_numpy())
        flat.append(pc.fill_null(lists.flatten(), ""))
    # As one array: of each chunk, Arrow would hand out all values met so far again.
    encoded = pa.concat_arrays(flat).dictionary_encode()
    codes, distinct = encoded.indices.to_numpy(), encoded.dictionary
    return np.cumsum(np.concatenate(counts)), codes, distinct


def _lists(chunk: pa.Array) -> pa.Array:
    """The chunk as lists of large strings."""
    if pa.types.is_dictionary(chunk.type):
        chunk = chunk.dictionary_decode()
    types, inner = pa.types, chunk.type
    if types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
        inner = inner.value_type if types.is_dictionary(inner) else inner
        if types.is_string(inner) or types.is_large_string(inner) or types.is_null(inner):
            return chunk.cast(pa.large_list(pa.large_string()))
    elif types.is_string(inner) or types.is_large_string(inner):
        return pc.split_pattern(chunk.cast(pa.large_string()), pattern=",").cast(
            pa.large_list(pa.large_string())
        )
    raise ConfigError(
        f"the column {NEGATIVE_KEYWORDS!r} holds {str(chunk.type)[:100]}",
        hint="It takes lists of texts, or texts with commas between the keywords.",
    )


def _inverted(offsets: np.ndarray, keywords: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Each keyword's rows, ascending, none twice: int64 (count + 1) offsets, int32 rows.

    Args:
        offsets: row i's keywords are `keywords[offsets[i]:offsets[i + 1]]`.
        keywords: 0 to `count` - 1, or -1 for one that counts for nothing.
        count: how many keywords there are.
    """
    pairs = keywords.astype(np.int64) << 32
    pairs |= np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pairs = in_order(pairs[pairs >= 0])
    held = np.bincount(pairs >> 32, minlength=count)
    return np.r_[0, np.cumsum(held, dtype=np.int64)], pairs.astype(np.uint32).view(np.int32)


def _union(parts: list[np.ndarray], size: int) -> np.ndarray:
    """The rows in any of several ascending int32 arrays, of `size` rows."""
    if len(parts) < 2:
        return parts[0] if parts else np.empty(0, np.int32)
    if sum(map(len, parts)) <= few(size):
        return in_order(np.concatenate(parts))
    mask = np.zeros(size, bool)
    for part in parts:
        mask[part] = True
    return np.flatnonzero(mask).astype(np.int32)


class GrowingNegatives:
    """As `Negatives`, for phrases that come one by one. One thread may extend while others look.

    A keyword is filed under the word under which there are fewest when it comes.
    """

    def __init__(self) -> None:
        self._size = 0
        self._numbers: dict[str, int] = {}
        self._spelled: list[str] = []
        self._kinds: list[int] = []
        self._words: list[tuple[str, ...]] = []
        self._rows: list[array[int]] = []
        self._filed: dict[str, list[int]] = {}
        # A growing array can't be read while it grows.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    @property
    def some(self) -> bool:
        """Whether there is any keyword."""
        return bool(self._words)

    def extend(self, values: Sequence[str | Sequence[str | None] | None]) -> None:
        """Add rows at the end.

        Args:
            values: each row's negative keywords: a list of texts, or a text with commas between, or None.
        """
        listed = [dict.fromkeys(keywords_of(value)) for value in values]
        with self._lock:
            for row, keywords in enumerate(listed, self._size):
                for keyword in keywords:
                    number = self._number(keyword)
                    if number >= 0:
                        self._rows[number].append(row)
            self._size += len(values)

    def _number(self, keyword: str) -> int:
        """The keyword's number, or -1 if it has no words."""
        number = self._numbers.get(keyword)
        if number is None:
            text = key(keyword)
            spoken = tuple(words(text))
            number = self._numbers[keyword] = len(self._words) if spoken else -1
            if spoken:
                self._spelled.append(keyword.strip())
                self._kinds.append(kind_of(text))
                self._words.append(spoken)
                self._rows.append(array("i"))
                rarest = min(spoken, key=lambda word: len(self._filed.get(word, ())))
                self._filed.setdefault(rarest, []).append(number)
        return number

    def _hitting(self, query: Sequence[str]) -> list[int]:
        asked = set(query)
        return [
            number
            for word in asked
            for number in self._filed.get(word, ())
            if asked.issuperset(self._words[number])
            and _hits(self._kinds[number], self._words[number], query)
        ]

    def blocked(self, query: Sequence[str]) -> np.ndarray:
        """The rows that have a negative keyword which hits a query; as `Negatives.blocked`."""
        with self._lock:
            parts = [np.array(self._rows[number], np.int32) for number in self._hitting(query)]
            return _union(parts, self._size)

    def hit(self, row: int, query: Sequence[str]) -> str | None:
        """A negative keyword of the row that hits the query, as it is written; None if none does."""
        with self._lock:
            for number in self._hitting(query):
                if row in self._rows[number]:
                    return self._spelled[number]
        return None
