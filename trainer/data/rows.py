"""Row-at-a-time reading: buffers good rows into batches and knows each row's line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from bidmatch.base.input_files import Source, undecodable
from trainer.data.collect import Batch, Collector

SURROGATE = re.compile("[\ud800-\udfff]")
_BATCH_ROWS = 1 << 16


class RowBuffer:
    """Collects single rows for one file and hands them on in batches.

    Args:
        collector: takes the batches.
        source: the file the rows come from.
        part: 0 training (or undivided), 1 test.
        encoding: its text encoding, to explain bytes that are not text.

    Attributes:
        last_bad: line of the last bad row, 0 for none.
    """

    def __init__(self, collector: Collector, source: Source, part: int, encoding: str = "utf-8"):
        self.collector, self.source, self.part, self.encoding = collector, source, part, encoding
        self._extra_names = collector.options.phrase_columns
        self._rows: list[tuple[Any, ...]] = []
        self.last_bad = 0

    def add(
        self,
        line: int,
        query: str,
        phrase: str,
        weight: float = 1.0,
        match_type: str = "",
        extras: Iterable[str] = (),
        phrase_id: str = "",
    ) -> None:
        """Take one row; it may still prove bad (empty text, negative weight) when the batch is handed on."""
        self._rows.append((line, query, phrase, weight, match_type, phrase_id, *extras))
        if len(self._rows) >= _BATCH_ROWS:
            self.flush()

    def bad(self, reason: str, line: int, hint: str | None = None) -> None:
        """A row that cannot be used; rows before it are handed on first, so that the first mistake is named.

        Raises:
            InputError: bad lines stop.
        """
        if self.collector.options.bad_lines == "stop":
            self.flush()
        self.last_bad = line
        self.collector.bad(reason, self.source.path, line, hint)

    def flush(self) -> None:
        """Hand on what is buffered."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            columns = [pa.array(column, pa.large_string()) for column in self._texts(rows)]
        except UnicodeEncodeError:
            rows = self._without_broken_text(rows)
            if not rows:
                return
            columns = [pa.array(column, pa.large_string()) for column in self._texts(rows)]
        queries, phrases, match_types, ids, *extras = columns
        batch = Batch(
            queries,
            phrases,
            np.array([row[3] for row in rows], dtype=np.float64),
            np.array([row[0] for row in rows], dtype=np.int64),
            match_types,
            ids,
            dict(zip(self._extra_names, extras, strict=False)),
        )
        self.collector.add(batch, self.source.path, self.part)

    @staticmethod
    def _texts(rows: list[tuple[Any, ...]]) -> list[tuple[str, ...]]:
        _, queries, phrases, _, *others = zip(*rows, strict=True)
        return [queries, phrases, *others]

    def _without_broken_text(self, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        good = []
        for row in rows:
            if any(isinstance(cell, str) and SURROGATE.search(cell) for cell in row):
                if self.collector.options.bad_lines == "stop":
                    raise undecodable(self.source, self.encoding)
                self.collector.bad("the text is not UTF-8", self.source.path, row[0])
            else:
                good.append(row)
        return good
