"""What is always the same in the JSON of a match, kept for the phrases that are answered most."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import orjson

from service.phrase_table import PhraseTable

_MOST = 200_000


class Fragment(NamedTuple):
    """Two pieces of JSON around a match's scores.

    Attributes:
        id: the phrase's id.
        head: from the beginning to where the score is written.
        tail: from behind the source to the end.
    """

    id: str
    head: bytes
    tail: bytes


class Fragments:
    """Fragments of a bundle's phrases and of live ones. Safe to ask from several threads at once.

    Args:
        count: phrases of the bundle; those of the live ones are made anew each time.
    """

    def __init__(self, count: int):
        self._count = count
        self._kept: dict[int, Fragment] = {}

    def of(self, rows: np.ndarray, table: PhraseTable) -> list[Fragment]:
        """One for each row, int64 (m,).

        Args:
            rows: rows of phrases.
            table: has their ids, texts and columns.
        """
        wanted = rows.tolist()
        kept = self._kept
        found = [kept.get(row) for row in wanted]
        missing = [at for at, one in enumerate(found) if one is None]
        if missing:
            ids, texts, columns = table.take(rows[missing])
            for at, id, text, own in zip(missing, ids, texts, columns, strict=True):
                made = found[at] = _fragment(id, text, own)
                if wanted[at] < self._count:
                    kept[wanted[at]] = made
            if len(kept) > _MOST:
                self._kept = {}
        return found  # type: ignore[return-value]


def _fragment(id: str, text: str, columns: dict[str, object]) -> Fragment:
    head = orjson.dumps({"id": id, "phrase": text})[:-1] + b',"score":'
    tail = b',"columns":%b}' % orjson.dumps(columns, default=str) if columns else b"}"
    return Fragment(id, head, tail)
