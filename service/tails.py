"""What a match says of its phrase's user columns, as JSON, kept for the phrases that are answered most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from service.phrase_table import PhraseTable

# Some hundred bytes each.
_MOST = 50_000


class Tails:
    """Tails of a bundle's phrases and of live ones. Safe to ask from several threads at once.

    Args:
        count: phrases of the bundle; those of the live ones are made anew each time.
    """

    def __init__(self, count: int):
        self._count = count
        self._kept: dict[int, bytes] = {}

    def of(self, rows: np.ndarray, table: PhraseTable) -> list[bytes]:
        """One for each row, int64 (m,).

        Args:
            rows: rows of phrases.
            table: has their columns.
        """
        wanted = rows.tolist()
        kept = self._kept
        found = [kept.get(row) for row in wanted]
        missing = [at for at, one in enumerate(found) if one is None]
        if missing:
            for at, own in zip(missing, table.columns(rows[missing]), strict=True):
                made = found[at] = _tail(own)
                if wanted[at] < self._count:
                    kept[wanted[at]] = made
            if len(kept) > _MOST:
                self._kept = {}
        return found  # type: ignore[return-value]


def _tail(columns: Mapping[str, Any]) -> bytes:
    return b',"columns":%b' % orjson.dumps(columns, default=str) if columns else b""
