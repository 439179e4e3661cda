"""Ids, texts and columns of phrases by row: the bundle's, and the live ones behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from service.live.phrases import LivePhrases


class PhraseTable:
    """Ids, texts and user columns by row, live rows included.

    Args:
        bundle: the bundle's phrases, one chunk a column.
        live: the live ones; None where there are none.
        names: the user's columns.
    """

    def __init__(self, bundle: pa.Table, live: LivePhrases | None, names: Sequence[str]):
        self._bundle, self._live, self._names = bundle, live, names

    def take(self, rows: np.ndarray) -> tuple[list[str], list[str], list[dict[str, Any]]]:
        """Ids, texts and columns of rows, int64; a column is left out where the phrase has no value."""
        count = self._bundle.num_rows
        inside = np.flatnonzero(rows < count)
        table = self._bundle.take(pa.array(rows[inside]))
        ids, texts = table["id"].to_pylist(), table["text"].to_pylist()
        columns: list[dict[str, Any]] = [{} for _ in ids]
        for name in self._names:
            for own, value in zip(columns, table[name].to_pylist(), strict=True):
                if value is not None:
                    own[name] = value
        if len(inside) == len(rows):
            return ids, texts, columns
        assert self._live is not None
        live = self._live
        for at, row in enumerate(rows.tolist()):
            if row >= count:
                row -= count
                own = {name: value for name, value in live.columns_of[row].items() if value is not None}
                ids.insert(at, live.ids[row])
                texts.insert(at, live.texts[row])
                columns.insert(at, own)
        return ids, texts, columns
