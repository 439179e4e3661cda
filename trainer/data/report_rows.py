"""The rows of a search-terms report: totals set apart, keywords out of their notation, counts parsed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from bidmatch.base.reports import COPYRIGHT, TOTAL, hidden_query_reason, is_empty, unwrap
from trainer.data.keywords import KEYWORD_TYPES, match_type_name, no_keyword_reason, split_notation
from trainer.data.numbers import parse_number
from trainer.data.reports import Report
from trainer.data.rows import RowBuffer

Cell = str | float

_SPREADSHEET_ERROR = re.compile(r"#(NAME\?|REF!|VALUE!|DIV/0!|N/A|NUM!|NULL!)")


def text_of(cell: Cell) -> str:
    """A cell as text; a whole number has no decimal point."""
    if isinstance(cell, str):
        return unwrap(cell)
    return str(int(cell)) if float(cell).is_integer() else str(cell)


def uses_notation(keywords: Iterable[Cell]) -> bool:
    """Whether a keyword column is written in match-type notation: then a bare keyword is broad."""
    return any(split_notation(text_of(keyword))[1] in ("exact", "phrase") for keyword in keywords)


def read_rows(
    records: Iterator[tuple[int, Sequence[Cell] | str]], report: Report, notation: bool, rows: RowBuffer
) -> None:
    """Read the records below the header line into `rows`.

    Args:
        records: (line, cells), or (line, reason) where a record cannot be taken apart.
        report: the columns.
        notation: what `uses_notation` says of the first rows.
        rows: takes the pairs, counts the rest.

    Raises:
        InputError: a row is bad and bad lines stop.
    """
    layout = report.layout
    width, weight_at = layout.width, cast(int, layout.weight)
    leave_out = rows.collector.leave_out
    for line, cells in records:
        if isinstance(cells, str):
            rows.bad(cells, line)
            continue
        if not any(text_of(cell).strip() for cell in cells):
            continue
        apart = _apart(cells, report)
        if apart is not None:
            leave_out(apart)
            continue
        if len(cells) != width and (
            len(cells) < width or any(text_of(cell).strip() for cell in cells[width:])
        ):
            rows.bad(
                f"the row has {len(cells)} cells where the header has {width}",
                line,
                "The file may be cut short, or a text contains the separator. Export the report again.",
            )
            continue
        query, keyword = text_of(cells[layout.query]), text_of(cells[layout.phrase])
        broken = _SPREADSHEET_ERROR.fullmatch(query) or _SPREADSHEET_ERROR.fullmatch(keyword)
        if broken is not None:
            rows.bad(
                f"a spreadsheet turned the text into the error {broken[0]}",
                line,
                "Export the report as CSV and give that file, without saving it in a spreadsheet first.",
            )
            continue
        own = "" if layout.match_type is None else match_type_name(text_of(cells[layout.match_type]))
        term = "" if report.term_match is None else match_type_name(text_of(cells[report.term_match]))
        reason = no_keyword_reason(keyword, own or term) or hidden_query_reason(query)
        if reason is not None:
            leave_out(reason)
            continue
        weight = count_of(cells[weight_at])
        if weight is None:
            rows.bad(
                f"{report.headers[weight_at].strip()} is {text_of(cells[weight_at])[:40]!r}, not a number",
                line,
            )
            continue
        text, noted = split_notation(keyword)
        match_type = noted or own or ("broad" if notation else term if term in KEYWORD_TYPES else "")
        extras = [text_of(cells[at]) for at in layout.extras.values()]
        rows.add(line, "" if is_empty(query) else query, text, weight, match_type, extras)
    rows.flush()


def count_of(cell: Cell) -> float | None:
    """The number in a metric cell; 0 where it is empty (`--`), None where it is no number."""
    if not isinstance(cell, str):
        return float(cell)
    if cell.isascii() and cell.isdigit():
        return float(cell)
    cell = unwrap(cell)
    return 0.0 if is_empty(cell) else parse_number(cell, whole=True)


def _apart(cells: Sequence[Cell], report: Report) -> str | None:
    """Why a row is no data row: a total, a copyright line, the header again; else None."""
    first = next((text for cell in cells if (text := text_of(cell).strip()) and not is_empty(text)), "")
    if first[:1] in 'Tt"Gg' and TOTAL.match(first):
        at = report.layout.phrase
        if at >= len(cells) or is_empty(text_of(cells[at])):
            return "total line"
    if (
        first[:1] in "©(Cc"
        and COPYRIGHT.match(first)
        and sum(1 for cell in cells if text_of(cell).strip()) == 1
    ):
        return "copyright line"
    if (
        first
        and first == report.headers[0].strip()
        and [text_of(cell).strip() for cell in cells] == [header.strip() for header in report.headers]
    ):
        return "header line again"
    return None
