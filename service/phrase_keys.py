"""Which phrases a text leads to: those that equal it, those whose words it contains, the one with this id."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bidmatch.base import text
from export.bundle.lookup import candidates, hash_texts

_NOTHING = np.empty(0, np.int64)


class PhraseKeys:
    """Finds the phrases whose key equals a query's key.

    Args:
        table: the bundle's, int64 (2, L), see `export.bundle.lookup`.
        texts: the phrases' texts, one a row, best in one chunk.
    """

    def __init__(self, table: np.ndarray, texts: pa.ChunkedArray):
        self._table, self._texts = table, texts

    def find(self, keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The phrases equal to each key; several phrases may share one key (with different match types).

        Args:
            keys: n query keys, as `bidmatch.base.text.key` makes them; an empty key equals nothing.

        Returns:
            Two int64 arrays of equal length, ordered by the first: the position in `keys`, the phrase's row.
        """
        positions, rows = candidates(self._table, hash_texts(keys))
        if not len(rows):
            return _NOTHING, _NOTHING
        texts = self._texts.take(pa.array(rows)).to_pylist()
        equal = np.fromiter(
            (
                keys[position] != "" and text.key(phrase) == keys[position]
                for position, phrase in zip(positions.tolist(), texts, strict=True)
            ),
            bool,
            len(rows),
        )
        return positions[equal], rows[equal]


class PhraseIds:
    """Finds the phrase with an id.

    Args:
        table: the bundle's, int64 (2, L), see `export.bundle.lookup`.
        ids: the phrases' ids, one a row, best in one chunk.
    """

    def __init__(self, table: np.ndarray, ids: pa.ChunkedArray):
        self._table, self._ids = table, ids

    def find(self, ids: list[str]) -> dict[str, int]:
        """The row of each id that there is."""
        places, rows = candidates(self._table, hash_texts(ids))
        if not len(rows):
            return {}
        held = self._ids.take(pa.array(rows)).to_pylist()
        return {
            one: row
            for one, row, place in zip(held, rows.tolist(), places.tolist(), strict=True)
            if one == ids[place]
        }
