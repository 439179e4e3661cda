"""Match types that advertisers bought: which phrases of type `phrase` a query contains."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from service.rules.filters import Sort, kind_of
from service.rules.ranges import places
from service.rules.words import hashes_of, joined, split, word_hash, words

MATCH_TYPE = "match_type"
BROAD, PHRASE, EXACT = 0, 1, 2
_CODES = {"phrase": PHRASE, "exact": EXACT}

# Words of a query in which runs are looked for, and of the longest phrase that can be one: it bounds what one
# query can cost. Longer phrases still match a query that equals them.
MAX_WORDS = 64

_CHUNK = 1 << 18
_LENGTH_BITS = np.uint64(8)
_LENGTH_MASK = np.uint64((1 << 8) - 1)
# An odd number has an inverse modulo 2^64, which moves a hash taken anywhere in a text to its start.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def match_type_code(match_type: object) -> int:
    """0 broad, 1 phrase, 2 exact; whatever is neither `phrase` nor `exact` is broad."""
    return _CODES.get(match_type, BROAD) if isinstance(match_type, str) else BROAD


def match_type_codes(table: pa.Table) -> np.ndarray:
    """The match type of each row: uint8 (L,), 0 broad, 1 phrase, 2 exact; all broad without the column."""
    codes = np.zeros(table.num_rows, np.uint8)
    column = table.column(MATCH_TYPE) if MATCH_TYPE in table.column_names else None
    kind = None if column is None else kind_of(column.type)
    if column is None or kind is None or kind.many or kind.sort is not Sort.TEXT:
        return codes
    start = 0
    for chunk in column.chunks:
        if not pa.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_encode()
        meant = [match_type_code(name) for name in chunk.dictionary.to_pylist()]
        # One more at the end, which the place -1 of a null finds.
        indices = pc.fill_null(chunk.indices.cast(pa.int64()), -1).to_numpy()
        codes[start : start + len(chunk)] = np.array([*meant, BROAD], np.uint8)[indices]
        start += len(chunk)
    return codes


def _powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(sums: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The hashes of runs from their sums, with the length (below 256) in the lowest byte: uint64."""
    values = (sums ^ (sums >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values >> _LENGTH_BITS) << _LENGTH_BITS) | lengths.astype(np.uint64)


def _sums(hashes: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The polynomial of each run's word hashes, modulo 2^64: the same wherever the run stands."""
    count = len(hashes)
    prefix = np.r_[np.uint64(0), np.cumsum(hashes * _powers(_BASE, count), dtype=np.uint64)]
    sums: np.ndarray = (prefix[starts + lengths] - prefix[starts]) * _powers(_INVERSE, count)[starts]
    return sums


def run_table(texts: pa.ChunkedArray | pa.Array, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `PhraseRuns` looks phrases up in; the same on every machine, so it can be saved.

    Args:
        texts: (L,) the texts of all phrases, no nulls.
        rows: integers, the rows that are of match type `phrase`.

    Returns:
        uint64 (m,) ascending: a hash of the phrase's words, their number in its lowest byte. int32 (m,): the
        phrase's row. Phrases with no words, or more than `MAX_WORDS`, are not in it.
    """
    hashes, kept = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK].astype(np.int32)
        chunk = texts.take(pa.array(part))
        if isinstance(chunk, pa.ChunkedArray):
            # 64-bit offsets: chunks of long texts may not join otherwise.
            chunk = chunk.cast(pa.large_string()).combine_chunks()
            chunk = chunk if isinstance(chunk, pa.Array) else pa.concat_arrays(chunk.chunks)
        parts = split(chunk)
        lengths = np.diff(parts.offsets)
        fits = (lengths > 0) & (lengths <= MAX_WORDS)
        words_of = hashes_of(parts.distinct.to_pylist())[parts.codes]
        hashes.append(_mixed(_sums(words_of, parts.offsets[:-1][fits], lengths[fits]), lengths[fits]))
        kept.append(part[fits])
    every, of_row = np.concatenate(hashes), np.concatenate(kept)
    order = np.lexsort((of_row, every))
    return every[order], of_row[order]


class PhraseRuns:
    """Finds the phrases whose words are a contiguous run of a query's words, in their order.

    Takes 12 bytes a phrase. Runs whose hash agrees are checked against the text, so a collision never gives a
    wrong answer.

    Args:
        texts: (L,) the texts of all phrases, best in one chunk.
        hashes: uint64 (m,), of `run_table`.
        rows: int32 (m,), of `run_table`.
    """

    def __init__(self, texts: pa.ChunkedArray | pa.Array, hashes: np.ndarray, rows: np.ndarray):
        one_chunk = isinstance(texts, pa.ChunkedArray) and texts.num_chunks == 1
        self._texts = texts.chunk(0) if one_chunk else texts
        self._hashes, self._rows = hashes, rows
        self._lengths = np.flatnonzero(
            np.bincount((hashes & _LENGTH_MASK).astype(np.uint8), minlength=MAX_WORDS + 1)
        )

    @classmethod
    def of(cls, texts: pa.ChunkedArray | pa.Array, rows: np.ndarray) -> PhraseRuns:
        """From the texts of all phrases, and the rows that are of match type `phrase`."""
        return cls(texts, *run_table(texts, rows))

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, queries: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """The phrases that each query contains.

        A query costs one look-up for each of its first `MAX_WORDS` words and each length that phrases have.

        Args:
            queries: the `words` of n queries.

        Returns:
            Two int64 arrays of equal length, ordered by the first, then the second, no pair twice: the
            position in `queries`, the phrase's row.
        """
        asked = [query[:MAX_WORDS] for query in queries]
        spoken = [word for query in asked for word in query]
        empty = np.empty(0, np.int64)
        if not spoken or not len(self):
            return empty, empty
        hashes = np.fromiter((word_hash(word) for word in spoken), np.uint64, len(spoken))
        sizes = np.fromiter((len(query) for query in asked), np.int64, len(asked))
        left = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(spoken))
        starts, which = np.nonzero(self._lengths <= left[:, None])
        lengths = self._lengths[which]
        runs = _mixed(_sums(hashes, starts, lengths), lengths)
        first = np.searchsorted(self._hashes, runs)
        there = np.flatnonzero(self._hashes[np.minimum(first, len(self) - 1)] == runs)
        if not len(there):
            return empty, empty
        position_of = np.repeat(np.arange(len(asked)), sizes)
        # A query that repeats itself has the same run several times.
        wanted: dict[tuple[int, str], int] = {}
        for at in there.tolist():
            start = int(starts[at])
            text = " ".join(spoken[start : start + int(lengths[at])])
            wanted[int(position_of[start]), text] = at
        slots = np.fromiter(wanted.values(), np.int64, len(wanted))
        counts = np.searchsorted(self._hashes, runs[slots], side="right") - first[slots]
        rows = self._rows[places(first[slots], counts)].astype(np.int64)
        owners = np.repeat(np.arange(len(slots)), counts).tolist()
        keys = list(wanted)
        texts = self._texts.take(pa.array(rows)).to_pylist()
        sound = [joined(text) == keys[owner][1] for text, owner in zip(texts, owners, strict=True)]
        rows = rows[sound]
        positions = np.array([keys[owner][0] for owner in owners], np.int64)[sound]
        order = np.lexsort((rows, positions))
        return positions[order], rows[order]


class GrowingRuns:
    """As `PhraseRuns`, for phrases that come one by one.

    One thread may extend while others find; phrases that are added meanwhile may be found already.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        self._lengths: tuple[int, ...] = ()
        self._extending = threading.Lock()

    def extend(self, texts: Sequence[str], rows: Sequence[int]) -> None:
        """Add phrases of match type `phrase`.

        Args:
            texts: their texts.
            rows: their rows, each greater than all before.
        """
        with self._extending:
            lengths = set(self._lengths)
            for text, row in zip(texts, rows, strict=True):
                spoken = words(text)
                if 0 < len(spoken) <= MAX_WORDS:
                    self._rows.setdefault(" ".join(spoken), []).append(int(row))
                    lengths.add(len(spoken))
            self._lengths = tuple(sorted(lengths))

    def find(self, queries: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """The phrases that each query contains; as `PhraseRuns.find`."""
        positions: list[int] = []
        rows: list[int] = []
        for position, query in enumerate(queries):
            size = min(len(query), MAX_WORDS)
            runs = {
                " ".join(query[start : start + length])
                for length in self._lengths
                for start in range(size - length + 1)
            }
            found = sorted(row for run in runs for row in self._rows.get(run, ()))
            rows += found
            positions += [position] * len(found)
        return np.array(positions, np.int64), np.array(rows, np.int64)
