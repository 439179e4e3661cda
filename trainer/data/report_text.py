"""Search-terms reports as delimited text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, undecodable
from trainer.data.collect import Collector
from trainer.data.columns import is_log_header
from trainer.data.delimited import DELIMITERS, split_rows, text_lines
from trainer.data.options import ReadOptions
from trainer.data.report_rows import Cell, read_rows, uses_notation
from trainer.data.reports import HEADER_WITHIN, Report, explain, find_report
from trainer.data.rows import RowBuffer

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
    first_line = head.lstrip().partition("\n")[0]
    # Below a header there is no other, though a row may read like one: its query may be "search term".
    headed = any(is_log_header(first_line.split(delimiter)) for delimiter in DELIMITERS)
    within = 1 if headed else HEADER_WITHIN
    for delimiter in DELIMITERS:
        records = [
            (line, cells)
            for line, cells in islice(
                split_rows(iter(io.StringIO(head, newline="")), delimiter, True), within
            )
            if not isinstance(cells, str)
        ]
        report = find_report(records, options, source.path)
        if report is not None:
            return TextReport(source, encoding, delimiter, report, head)
        problem = problem or explain(records, source.path)
    return problem
