"""The records of delimited text, and where one cannot be taken apart."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

_CELL_CHARS = 1 << 20


def table_records(
    lines: Iterable[tuple[int, str]], delimiter: str, *, quoted: bool
) -> Iterator[tuple[int, list[str] | str]]:
    """Each record's first line and its cells; where a record cannot be taken apart, the reason instead.

    After such a record reading goes on behind its first line: a quotation mark that is never closed takes no
    other line with it. A blank line is a record without cells.

    Args:
        lines: numbers and texts, line ends kept.
        delimiter: one character.
        quoted: whether `"` quotes cells; else it is a character like others.
    """
    csv.field_size_limit(_CELL_CHARS)
    feed = _Feed(lines)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(feed, delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        feed.taken.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            yield feed.taken[0][0], _reason(str(problem))
            feed.go_back()
            continue
        yield feed.taken[0][0], cells


class _Feed:
    """Lines for a `csv.reader`, which can be given once more; `taken` are those of the record at hand."""

    def __init__(self, lines: Iterable[tuple[int, str]]):
        self.taken: list[tuple[int, str]] = []
        self._lines = iter(lines)
        self._again: deque[tuple[int, str]] = deque()

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines)
        self.taken.append(line)
        return line[1]

    def go_back(self) -> None:
        """To the line behind the record's first."""
        self._again.extendleft(reversed(self.taken[1:]))


def _reason(problem: str) -> str:
    if "field larger" in problem or "unexpected end" in problem:
        return 'a quotation mark (") is opened and never closed'
    if "expected after" in problem:
        return 'a quotation mark (") stands in the middle of a text; inside quotes it must be doubled ("")'
    return f"the line cannot be taken apart ({problem})"
