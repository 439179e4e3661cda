"""Match type `phrase`: which phrases, bought for queries that contain their words, a query contains."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from export.bundle.lookup import hash_texts
from service.rules.ranges import places
from service.rules.words import joined, words

# Words of a query in which phrases are looked for: it bounds what one query can cost. A longer phrase still
# matches a query that equals it.
MAX_WORDS = 64

_CHUNK = 1 << 16


def longest_phrase(texts: pa.ChunkedArray | pa.Array, rows: np.ndarray) -> int:
    """Words of the longest phrase among some rows of the texts, at most `MAX_WORDS`; 0 for no rows."""
    longest = 0
    for start in range(0, len(rows), _CHUNK):
        part = texts.take(pa.array(rows[start : start + _CHUNK]))
        ascii_ = pc.string_is_ascii(part)
        counts = pc.count_substring_regex(part.filter(ascii_), pattern=r"\w+")
        other = part.filter(pc.invert(ascii_)).to_pylist()
        longest = max(longest, pc.max(counts).as_py() or 0, *(len(words(one)) for one in other))
        if longest >= MAX_WORDS:
            return MAX_WORDS
    return longest


def _runs(query: Sequence[str], longest: int) -> set[str]:
    """Every run of up to `longest` words among the first `MAX_WORDS` of a query, joined by spaces."""
    size = min(len(query), MAX_WORDS)
    return {
        " ".join(query[start:end])
        for start in range(size)
        for end in range(start + 1, min(start + longest, size) + 1)
    }


class PhraseRuns:
    """Finds the phrases whose words are a contiguous run of a query's words, in their order.

    Args:
        table: the bundle's, int64 (2, n), see `export.bundle.lookup`: by the words of phrases of match type
            `phrase`.
        texts: the phrases' texts, one a row, best in one chunk.
    """

    def __init__(self, table: np.ndarray, texts: pa.ChunkedArray | pa.Array):
        one_chunk = isinstance(texts, pa.ChunkedArray) and texts.num_chunks == 1
        self._texts = texts.chunk(0) if one_chunk else texts
        # A plain view: indexing np.memmap itself is slow.
        self._hashes, self._rows = np.asarray(table[0]), np.asarray(table[1])
        self._longest = longest_phrase(self._texts, self._rows)

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, queries: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """The phrases that each query contains.

        A query costs one look-up for each run of its first `MAX_WORDS` words that is no longer than the
        longest phrase.

        Args:
            queries: the `words` of n queries.

        Returns:
            Two int64 arrays of equal length, ordered by the first, then the second, no pair twice: the
            position in `queries`, the phrase's row.
        """
        asked = [(at, run) for at, query in enumerate(queries) for run in _runs(query, self._longest)]
        empty = np.empty(0, np.int64)
        if not asked:
            return empty, empty
        hashes = hash_texts(run for _, run in asked)
        first = np.searchsorted(self._hashes, hashes)
        there = np.flatnonzero(self._hashes[np.minimum(first, len(self) - 1)] == hashes)
        if not len(there):
            return empty, empty
        first = first[there]
        counts = np.searchsorted(self._hashes, hashes[there], side="right") - first
        rows = self._rows[places(first, counts)]
        pairs = [asked[at] for at in np.repeat(there, counts).tolist()]
        texts = self._texts.take(pa.array(rows)).to_pylist()
        sound = [joined(text) == run for text, (_, run) in zip(texts, pairs, strict=True)]
        rows = rows[sound]
        positions = np.array([at for at, _ in pairs], np.int64)[sound]
        order = np.lexsort((rows, positions))
        return positions[order], rows[order]


class GrowingRuns:
    """As `PhraseRuns`, for phrases that come one by one.

    One thread may extend while others find; phrases that are added meanwhile may be found already.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        self._longest = 0
        self._extending = threading.Lock()

    def __len__(self) -> int:
        """Different runs of words."""
        return len(self._rows)

    def extend(self, texts: Sequence[str], rows: Sequence[int]) -> None:
        """Add phrases of match type `phrase`.

        Args:
            texts: their texts.
            rows: their rows.
        """
        with self._extending:
            for text, row in zip(texts, rows, strict=True):
                spoken = words(text)
                if 0 < len(spoken) <= MAX_WORDS:
                    self._rows.setdefault(" ".join(spoken), []).append(int(row))
                    self._longest = max(self._longest, len(spoken))

    def find(self, queries: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """The phrases that each query contains; as `PhraseRuns.find`."""
        positions: list[int] = []
        rows: list[int] = []
        for position, query in enumerate(queries):
            found = sorted(row for run in _runs(query, self._longest) for row in self._rows.get(run, ()))
            rows += found
            positions += [position] * len(found)
        return np.array(positions, np.int64), np.array(rows, np.int64)
