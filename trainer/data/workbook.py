"""Search-terms reports and click logs as Excel workbooks."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time
from itertools import islice
from typing import Any
from xml.etree.ElementTree import ParseError

import openpyxl
from openpyxl.utils.exceptions import InvalidFileException

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source
from trainer.data.collect import Collector
from trainer.data.columns import Layout, log_layout
from trainer.data.options import ReadOptions
from trainer.data.report_rows import Cell, count_of, read_rows, text_of, uses_notation
from trainer.data.reports import HEADER_WITHIN, Report, explain, find_report
from trainer.data.rows import RowBuffer

_LOOK_AT_ROWS = 2000
_DAMAGE = (
    InvalidFileException,
    zipfile.BadZipFile,
    zlib.error,
    ParseError,
    KeyError,
    IndexError,
    ValueError,
    TypeError,
    RuntimeError,
    EOFError,
    OSError,
)


class Workbook:
    """A report, or a click log, in the first fitting sheet of an Excel workbook.

    Attributes:
        source: the file.
        sheet: title of the sheet.
        report: its columns; of platform "" where it is a plain click log.
        notation: whether keywords are in match-type notation.
    """

    def __init__(self, source: Source, options: ReadOptions):
        self.source = source
        problem: InputError | None = None
        for sheet in self._sheets():
            records = [
                (line, [text_of(cell) for cell in cells])
                for line, cells in islice(self._rows(sheet), HEADER_WITHIN)
            ]
            report = find_report(records, options, source.path) or _plain_log(records, options, source)
            if report is not None:
                self.sheet, self.report = sheet, report
                keywords = (
                    cells[report.layout.phrase] if len(cells) > report.layout.phrase else ""
                    for _, cells in islice(self._records(), _LOOK_AT_ROWS)
                )
                self.notation = bool(report.platform) and uses_notation(keywords)
                return
            problem = problem or explain(records, source.path)
        raise problem or InputError(
            "no sheet of the workbook has a header line that names a search term and a keyword",
            file=source.path,
            hint="Say which columns to use with --query-column and --phrase-column.",
        )

    @contextmanager
    def _open(self) -> Iterator[Any]:
        book = None
        try:
            # By stream, since openpyxl refuses a path whose extension it does not know.
            with self.source.path.open("rb") as stream:
                book = openpyxl.load_workbook(stream, read_only=True, data_only=True)
                yield book
        except _DAMAGE as bad:
            raise self._damaged(bad) from bad
        finally:
            if book is not None:
                book.close()

    def _damaged(self, problem: Exception) -> InputError:
        return InputError(
            f"the Excel workbook is damaged or protected ({problem})",
            file=self.source.path,
            hint="Download it again, or save it as CSV.",
        )

    def _sheets(self) -> list[str]:
        with self._open() as book:
            return [sheet.title for sheet in book.worksheets]

    def _rows(self, title: str) -> Iterator[tuple[int, list[Cell]]]:
        with self._open() as book:
            sheet = book[title]
            # Amazon's exports declare dimensions that do not hold.
            sheet.reset_dimensions()
            for line, values in enumerate(sheet.iter_rows(values_only=True), start=1):
                yield line, [_cell(value) for value in values]

    def _records(self) -> Iterator[tuple[int, list[Cell]]]:
        width = self.report.layout.width
        for line, cells in self._rows(self.sheet):
            if line > self.report.header_line:
                yield (
                    line,
                    cells + [""] * (width - len(cells)) if any(cell != "" for cell in cells[1:]) else cells,
                )

    def read(
        self,
        collector: Collector,
        part: int,
        advance: Callable[[int], None] | None = None,  # noqa: ARG002
    ) -> None:
        """Read all rows.

        Raises:
            InputError: a row is bad and bad lines stop.
        """
        rows = RowBuffer(collector, self.source, part)
        if self.report.platform:
            read_rows(self._records(), self.report, self.notation, rows)
        else:
            _read_plain_rows(self._records(), self.report.layout, rows)


def _cell(value: Any) -> Cell:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _plain_log(
    records: Sequence[tuple[int, list[str]]], options: ReadOptions, source: Source
) -> Report | None:
    for line, cells in records:
        if sum(1 for cell in cells if cell.strip()) < 2:
            continue
        layout = log_layout(cells, options, source.path)
        return None if layout is None else Report("", layout, None, cells, line)
    return None


def _read_plain_rows(records: Iterator[tuple[int, list[Cell]]], layout: Layout, rows: RowBuffer) -> None:
    for line, cells in records:
        if not any(cell != "" for cell in cells):
            continue
        cells = cells + [""] * (layout.width - len(cells))
        cell = 1.0 if layout.weight is None else cells[layout.weight]
        weight = float("nan") if cell == "" else count_of(cell)
        if weight is None:
            rows.bad(f"the weight {text_of(cell)[:40]!r} is not a number", line)
            continue
        match_type = "" if layout.match_type is None else text_of(cells[layout.match_type])
        extras = [text_of(cells[at]) for at in layout.extras.values()]
        rows.add(
            line, text_of(cells[layout.query]), text_of(cells[layout.phrase]), weight, match_type, extras
        )
    rows.flush()
