"""Search-terms reports as delimited text or as an Excel workbook."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from itertools import islice
from typing import Any
from xml.etree.ElementTree import ParseError

import openpyxl
from openpyxl.utils.exceptions import InvalidFileException

from bidmatch.base.errors import InputError
from trainer.data.collect import Collector
from trainer.data.columns import Layout, log_layout
from trainer.data.delimited import DELIMITERS, split_rows, text_lines
from trainer.data.options import ReadOptions
from trainer.data.report_rows import Cell, count_of, read_rows, text_of, uses_notation
from trainer.data.reports import HEADER_WITHIN, Report, explain, find_report
from trainer.data.rows import RowBuffer
from trainer.data.source import Source, undecodable

_LOOK_AT_ROWS = 2000

Records = Iterator[tuple[int, Sequence[Cell] | str]]


class TextReport:
    """A report in a delimited text file.

    Attributes:
        source: the file.
        encoding: its codec.
        delimiter: what separates cells.
        report: its columns.
        notation: whether keywords are in match-type notation.
        bare_quotes: whether `"keyword"` in plain quotes is phrase-match notation, not quoting.
    """

    def __init__(self, source: Source, encoding: str, delimiter: str, report: Report, head: str):
        self.source, self.encoding, self.delimiter, self.report = source, encoding, delimiter, report
        self.bare_quotes = _bare_quotes(head, delimiter, report)
        self.notation = uses_notation(
            cells[report.layout.phrase]
            for _, cells in islice(self._records(io.StringIO(head, newline="")), _LOOK_AT_ROWS)
            if not isinstance(cells, str) and len(cells) == report.layout.width
        )

    def _records(self, lines: Iterator[str]) -> Records:
        if self.bare_quotes:
            lines = _restore_quotes(lines, self.delimiter)
        for line, cells in split_rows(lines, self.delimiter, True):
            if line <= self.report.header_line:
                continue
            if self.bare_quotes and not isinstance(cells, str):
                keyword = self.report.layout.phrase
                cells = [cell if at == keyword else cell.strip('"') for at, cell in enumerate(cells)]
            yield line, cells

    def read(self, collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        """Read all rows.

        Raises:
            InputError: a row is bad and bad lines stop, or the bytes are not text.
        """
        rows = RowBuffer(collector, self.source, part, self.encoding)
        try:
            with self.source.open(advance) as stream:
                lines = text_lines(stream, self.encoding)
                read_rows(self._records(lines), self.report, self.notation, rows)
        except UnicodeDecodeError:
            raise undecodable(self.source, self.encoding) from None


def _bare_quotes(head: str, delimiter: str, report: Report) -> bool:
    """Whether keywords alone stand in quotes that no writer of delimited text would need."""
    keyword, query = report.layout.phrase, report.layout.query
    quoted = [0, 0]
    raw = enumerate(io.StringIO(head, newline=""), start=1)
    for line, text in islice(raw, _LOOK_AT_ROWS):
        if line < report.header_line:
            continue
        cells = text.rstrip("\r\n").split(delimiter)
        if '"""' in text or (line == report.header_line and '"' in text):
            return False
        if len(cells) >= report.layout.width:
            for at, column in enumerate((keyword, query)):
                quoted[at] += len(cells[column]) > 2 and cells[column][0] == '"' == cells[column][-1]
    return quoted[0] > 0 and quoted[1] == 0


def _restore_quotes(lines: Iterator[str], delimiter: str) -> Iterator[str]:
    mark = re.escape(delimiter)
    needless = re.compile(rf'(^|(?<={mark}))"([^"\r\n,{mark}]*)"(?={mark}|[\r\n]|$)')
    for line in lines:
        yield needless.sub(r'"""\2"""', line)


def recognise_text_report(
    source: Source, head: str, encoding: str, options: ReadOptions
) -> TextReport | InputError | None:
    """The report that a text file is; the error where it is one that cannot be used; None where it is none.

    Raises:
        InputError: it is a report and lacks a column.
    """
    problem = None
    for delimiter in DELIMITERS:
        records = [
            (line, cells)
            for line, cells in islice(
                split_rows(iter(io.StringIO(head, newline="")), delimiter, True), HEADER_WITHIN
            )
            if not isinstance(cells, str)
        ]
        report = find_report(records, options, source.path)
        if report is not None:
            return TextReport(source, encoding, delimiter, report, head)
        problem = problem or explain(records, source.path)
    return problem


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

    def _open(self) -> Any:
        try:
            return openpyxl.load_workbook(self.source.path, read_only=True, data_only=True)
        except (
            InvalidFileException,
            zipfile.BadZipFile,
            KeyError,
            ValueError,
            ParseError,
            EOFError,
            OSError,
        ) as bad:
            raise self._damaged(bad) from bad

    def _damaged(self, problem: Exception) -> InputError:
        return InputError(
            f"the Excel workbook is damaged or protected ({problem})",
            file=self.source.path,
            hint="Download it again, or save it as CSV.",
        )

    def _sheets(self) -> list[str]:
        book = self._open()
        try:
            return [sheet.title for sheet in book.worksheets]
        finally:
            book.close()

    def _rows(self, title: str) -> Iterator[tuple[int, list[Cell]]]:
        book = self._open()
        try:
            sheet = book[title]
            # Amazon's exports declare dimensions that do not hold.
            sheet.reset_dimensions()
            for line, values in enumerate(sheet.iter_rows(values_only=True), start=1):
                yield line, [_cell(value) for value in values]
        except (zipfile.BadZipFile, KeyError, ValueError, ParseError, EOFError, IndexError) as bad:
            raise self._damaged(bad) from bad
        finally:
            book.close()

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
