"""What a match says of its phrase's user columns, as JSON, kept for the phrases that are answered most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson

# Some hundred bytes each.
_MOST = 50_000


def tail_of(columns: Mapping[str, Any]) -> bytes:
    """The tail of a phrase with these user columns; those without a value are left out."""
    there = {name: value for name, value in columns.items() if value is not None}
    return b',"columns":%b' % orjson.dumps(there, default=str) if there else b""


class Tails:
    """Tails of a bundle's phrases. Safe to ask from several threads at once.

    Args:
        columns: gives the user columns of rows, int64 (m,).
        count: phrases of the bundle; rows from there on have no tail here.
    """

    def __init__(self, columns: Callable[[np.ndarray], list[dict[str, Any]]], count: int):
        self._columns, self._count = columns, count
        self._kept: dict[int, bytes] = {}

    def of(self, rows: np.ndarray) -> list[bytes]:
        """One for each row, int64 (m,)."""
        wanted = rows.tolist()
        kept = self._kept
        found = [kept.get(row) if row < self._count else b"" for row in wanted]
        missing = [at for at, one in enumerate(found) if one is None]
        if missing:
            for at, own in zip(missing, self._columns(rows[missing]), strict=True):
                found[at] = kept[wanted[at]] = tail_of(own)
            if len(kept) > _MOST:
                self._kept = {}
        return found  # type: ignore[return-value]
