"""Ids, texts and columns of phrases by row: the bundle's, and the live ones behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from service.live.phrases import LivePhrases

Value = TypeVar("Value")


class PhraseTable:
    """Ids, texts and user columns by row, int64, live rows included.

    Args:
        bundle: the bundle's phrases, one chunk a column.
        live: the live ones; None where there are none.
        names: the user's columns.
    """

    def __init__(self, bundle: pa.Table, live: LivePhrases | None, names: Sequence[str]):
        self._bundle, self._live, self._names = bundle, live, names

    def take(self, rows: np.ndarray) -> tuple[list[str], list[str], list[dict[str, Any]]]:
        """Ids, texts and columns of rows."""
        return self.ids(rows), self.texts(rows), self.columns(rows)

    def ids(self, rows: np.ndarray) -> list[str]:
        """Ids of rows."""
        return self._with_live(rows, self._ours("id", rows), lambda live, row: live.ids[row])

    def texts(self, rows: np.ndarray) -> list[str]:
        """Texts of rows."""
        return self._with_live(rows, self._ours("text", rows), lambda live, row: live.texts[row])

    def columns(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """User columns of rows; a column is left out where the phrase has no value."""
        ours = int(np.count_nonzero(rows < self._bundle.num_rows))
        columns: list[dict[str, Any]] = [{} for _ in range(ours)]
        for name in self._names:
            for own, value in zip(columns, self._ours(name, rows), strict=True):
                if value is not None:
                    own[name] = value
        return self._with_live(
            rows,
            columns,
            lambda live, row: {
                name: value for name, value in live.columns_of[row].items() if value is not None
            },
        )

    def _ours(self, name: str, rows: np.ndarray) -> list[Any]:
        column = self._bundle[name]
        return column.take(pa.array(rows[rows < self._bundle.num_rows])).to_pylist()

    def _with_live(
        self, rows: np.ndarray, ours: list[Value], live_value: Callable[[LivePhrases, int], Value]
    ) -> list[Value]:
        """What the bundle says of its rows, with what live phrases say put in at their places."""
        count, live = self._bundle.num_rows, self._live
        if len(ours) == len(rows):
            return ours
        assert live is not None
        for at in np.flatnonzero(rows >= count).tolist():
            ours.insert(at, live_value(live, int(rows[at]) - count))
        return ours
