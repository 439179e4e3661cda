"""Tables below lines of text, and ads platforms' search terms reports, which are written so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bidmatch.base.reports import (
    AMAZON,
    ANY_PLATFORM,
    COPYRIGHT,
    FOREIGN_SEARCH_TERMS,
    GOOGLE,
    HEADER_WITHIN,
    MICROSOFT,
    SEARCH_TERMS,
    TOTAL,
    YEAR,
    canonical,
    hidden_query_reason,
    is_empty,
    unwrap,
)

_MARKS = GOOGLE | MICROSOFT | AMAZON | ANY_PLATFORM
_FITTING = 0.9
_KEYWORDS = ("searchkeyword", "keyword", "keywordtext", "targeting", "targetvalue", "matchedtarget")


@dataclass(frozen=True)
class Table:
    """A table in a text file.

    Attributes:
        line: of its first row.
        cells: of that row.
        titles: how many lines with text stand above it.
    """

    line: int
    cells: list[str]
    titles: int


def find_table(records: Sequence[tuple[int, list[str]]], names: Sequence[str]) -> Table | None:
    """The table that a file's lines are, or that begins below some; None where they have no width in common.

    Its first row names a query and has rows of its width below it, or has more than two cells as they do.

    Args:
        records: (line, cells) of a file's first lines, blank ones left out.
        names: canonical names of a query's column.
    """
    for at, (line, cells) in enumerate(records[:HEADER_WITHIN]):
        named = names_query(cells, names)
        if len(cells) < 2 or (at == 0 and named):
            if named and len(cells) > 1:
                return Table(line, cells, 0)
            continue
        below = [other for _, other in records[at + 1 :] if _has_data(other)]
        if sum(len(other) == len(cells) for other in below) < _FITTING * len(below):
            continue
        # A date line falls apart at its commas.
        if not named and below and YEAR.search(" ".join(cells)) and names_query(below[0], names):
            continue
        if (named and (below or reads_like_a_header(cells))) or (len(cells) > 2 and len(below) > 1):
            return Table(line, cells, at)
    return None


def _has_data(cells: Sequence[str]) -> bool:
    first = next((cell.strip() for cell in cells if cell.strip()), "")
    return bool(first) and not TOTAL.match(first) and not COPYRIGHT.match(first)


def names_query(cells: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a row names a query's column."""
    return any(canonical(cell) in names for cell in cells)


def is_report(table: Table) -> bool:
    """Whether a table whose first row names its columns comes from an ads platform."""
    keys = {canonical(cell) for cell in table.cells}
    return bool(keys & set(SEARCH_TERMS)) and (table.titles > 0 or bool(keys & _MARKS))


def reads_like_a_header(cells: Sequence[str]) -> bool:
    """Whether a row names columns, though none that is known to hold queries."""
    keys = [canonical(cell) for cell in cells]
    known = _MARKS | {*SEARCH_TERMS, *_KEYWORDS, "phrase", "clicks", "impressions", "date", "timestamp"}
    return any(key in FOREIGN_SEARCH_TERMS for key in keys) or sum(key in known for key in keys) > 1


def foreign_search_term(cells: Sequence[str]) -> str | None:
    """The name of a search term's column in another language than English, where there is one."""
    return next((cell.strip() for cell in cells if canonical(cell) in FOREIGN_SEARCH_TERMS), None)


class ReportRows:
    """Tells a report's rows that hold a search term from the others.

    Args:
        headers: the header line's cells.
        position: index of the search term's cell.

    Attributes:
        left_out: why rows were, and how many.
    """

    def __init__(self, headers: Sequence[str], position: int):
        self._headers = [header.strip() for header in headers]
        self._position = position
        keys = [canonical(header) for header in headers]
        self._keyword = next((keys.index(name) for name in _KEYWORDS if name in keys), None)
        self.left_out: Counter[str] = Counter()

    def apart(self, cells: Sequence[str]) -> bool:
        """Whether a row, of any width, is a total, a copyright line or the header again."""
        texts = [unwrap(cell) for cell in cells]
        first = next((text for text in texts if not is_empty(text)), "")
        reason = None
        if TOTAL.match(first) and self._is_total(first, texts):
            reason = "total line"
        elif COPYRIGHT.match(first) and sum(bool(text) for text in texts) == 1:
            reason = "copyright line"
        elif texts == self._headers:
            reason = "header line"
        if reason is not None:
            self.left_out[reason] += 1
        return reason is not None

    def _is_total(self, first: str, texts: Sequence[str]) -> bool:
        if self._keyword is not None:
            return self._keyword >= len(texts) or is_empty(texts[self._keyword])
        if ":" in first:
            return True
        others = (text for text in texts if text != first and not is_empty(text))
        return not any(character.isalpha() for text in others for character in text)

    def query(self, cells: Sequence[str]) -> str | None:
        """The search term of a row of full width, or None where a person typed none."""
        query = unwrap(cells[self._position])
        reason = hidden_query_reason(query)
        if reason is not None:
            self.left_out[reason] += 1
            return None
        return "" if is_empty(query) else query
