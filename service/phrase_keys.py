"""Which phrases equal a query: a map from keys to rows, lean enough for many millions of phrases."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bidmatch.base import text

_CHUNK = 65_536


class PhraseKeys:
    """Finds the phrases whose key equals a query's key.

    Keeps the 64-bit hash of each phrase's key, sorted, and the phrase's row: 12 bytes a phrase. A hash that
    agrees is checked against the text, so a collision never gives a wrong answer.

    Args:
        texts: the phrases' texts, one a row, best in one chunk.
    """

    def __init__(self, texts: pa.ChunkedArray):
        count = len(texts)
        if count > np.iinfo(np.int32).max:
            raise ValueError(f"{count} phrases are more than {np.iinfo(np.int32).max}")
        hashes = np.empty(count, np.int64)
        for start in range(0, count, _CHUNK):
            chunk = texts.slice(start, _CHUNK).to_pylist()
            # Python's own string hash: salted for each process, so no one can craft phrases that collide.
            hashes[start : start + len(chunk)] = [hash(text.key(phrase)) for phrase in chunk]
        order = np.argsort(hashes, kind="stable")
        self._texts = texts
        self._hashes = hashes[order]
        self._rows = order.astype(np.int32)

    def find(self, keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The phrases equal to each key; several phrases may share one key (with different match types).

        Args:
            keys: n query keys, as `bidmatch.base.text.key` makes them; an empty key equals nothing.

        Returns:
            Two int64 arrays of equal length, ordered by the first: the position in `keys`, the phrase's row.
        """
        hashes = np.fromiter((hash(key) for key in keys), np.int64, len(keys))
        first = np.searchsorted(self._hashes, hashes, side="left")
        counts = np.searchsorted(self._hashes, hashes, side="right") - first
        positions = np.repeat(np.arange(len(keys)), counts)
        if not len(positions):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        within = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._rows[np.repeat(first, counts) + within].astype(np.int64)
        texts = self._texts.take(pa.array(rows)).to_pylist()
        equal = np.fromiter(
            (
                keys[position] != "" and text.key(phrase) == keys[position]
                for position, phrase in zip(positions, texts, strict=True)
            ),
            bool,
            len(rows),
        )
        return positions[equal], rows[equal]
