"""Click logs as TSV or CSV: a vectorised path for clean files and a careful one that finds the bad line."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, undecodable
from bidmatch.base.tables import table_records
from trainer.data.collect import Batch, Collector
from trainer.data.columns import PHRASE, QUERY, Layout, canonical, log_layout, positional_layout
from trainer.data.numbers import parse_number
from trainer.data.options import ReadOptions
from trainer.data.rows import RowBuffer

DELIMITERS = ("\t", ",", ";", "|")
_NAMES = {"\t": "TSV", ",": "CSV", ";": "CSV with semicolons", "|": "CSV with bars"}


@dataclass(frozen=True)
class Dialect:
    """How a delimited file is written.

    Attributes:
        delimiter: one character.
        quoted: whether `"` quotes fields.
        encoding: codec.
        header_lines: physical lines up to the first data row.
    """

    delimiter: str
    quoted: bool
    encoding: str
    header_lines: int

    @property
    def name(self) -> str:
        """For people."""
        return _NAMES[self.delimiter]


def split_rows(lines: Iterator[str], delimiter: str, quoted: bool) -> Iterator[tuple[int, list[str] | str]]:
    """(first line, cells) of each record; (line, reason) where a record cannot be taken apart. Blank lines
    are passed over.
    """
    for line, cells in table_records(enumerate(lines, 1), delimiter, quoted=quoted):
        if isinstance(cells, str) or len(cells) > 1 or (cells and cells[0].strip()):
            yield line, cells


def text_lines(stream: BinaryIO, encoding: str) -> io.TextIOWrapper:
    """The stream as text with its line ends kept; bytes that are not UTF-8 become lone surrogates."""
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    return io.TextIOWrapper(stream, encoding=encoding, errors=errors, newline="")


def recognise_log(source: Source, head: str, encoding: str, options: ReadOptions) -> tuple[Dialect, Layout]:
    """Find delimiter and columns of a click log from its first line.

    Raises:
        InputError: nothing there looks like a query and a phrase.
    """
    found: list[tuple[int, str, int, list[str], bool]] = []
    for delimiter in DELIMITERS:
        quoted = options.quoted or delimiter != "\t" or head.lstrip().startswith('"')
        for line, cells in split_rows(iter(io.StringIO(head, newline="")), delimiter, quoted):
            if isinstance(cells, list):
                found.append((len(cells), delimiter, line, cells, quoted))
            break
    found.sort(key=lambda candidate: -candidate[0])
    problem: InputError | None = None
    by_position = any(name and name.isdecimal() for name in (options.query_column, options.phrase_column))
    for _, delimiter, line, cells, quoted in found:
        try:
            layout = log_layout(cells, options, source.path)
        except InputError as reason:
            problem = problem or reason
            continue
        if layout is not None:
            headed = not by_position or _is_header(cells, layout)
            header_lines = line + sum(cell.count("\n") for cell in cells) if headed else line - 1
            return Dialect(delimiter, quoted, encoding, header_lines), layout
    if problem is not None:
        raise problem
    width, delimiter, line, cells, quoted = found[0] if found else (0, "", 0, [], False)
    if delimiter == "\t" and (width == 2 or (width == 3 and parse_number(cells[2], whole=False) is not None)):
        layout = positional_layout(width, options, source.path)
        return Dialect(delimiter, options.quoted, encoding, line - 1), layout
    shown = ", ".join(cell.strip()[:40] for cell in cells[:12]) if width > 1 else "one column only"
    raise InputError(
        f"no column is named as a query and a phrase (first line: {shown})",
        file=source.path,
        line=line or None,
        hint="A click log has a header line with query and phrase (and weight), or is tab-separated without "
        "one. Say which columns to use with --query-column and --phrase-column (names, or positions such "
        "as 1 and 2).",
    )


def _is_header(cells: list[str], layout: Layout) -> bool:
    if layout.weight is not None:
        return parse_number(cells[layout.weight], whole=False) is None
    return canonical(cells[layout.query]) in QUERY or canonical(cells[layout.phrase]) in PHRASE


def read_log_file(
    source: Source,
    dialect: Dialect,
    layout: Layout,
    collector: Collector,
    part: int,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Read a delimited click log into `collector`.

    Raises:
        InputError: a line is bad and bad lines stop.
    """
    if dialect.encoding.startswith("utf-8"):
        staged = Collector(collector.options)
        if _read_fast(source, dialect, layout, staged, part, advance):
            collector.extend(staged)
            return
        advance = None
    _read_carefully(source, dialect, layout, RowBuffer(collector, source, part, dialect.encoding), advance)


class _Scan(io.RawIOBase):
    """Passes bytes on and notices what the vectorised parser would read differently from the careful one."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.quotes = 0
        self.nul = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        block = self._stream.read(len(buffer))
        self.quotes += block.count(b'"')
        self.nul |= b"\0" in block
        buffer[: len(block)] = block
        return len(block)


def _read_fast(
    source: Source,
    dialect: Dialect,
    layout: Layout,
    staged: Collector,
    part: int,
    advance: Callable[[int], None] | None,
) -> bool:
    """Whether the whole file was clean and is in `staged`."""
    names = [str(column) for column in range(layout.width)]
    wanted = {layout.query, layout.phrase, *layout.extras.values()}
    wanted |= {at for at in (layout.weight, layout.match_type) if at is not None}
    convert = pcsv.ConvertOptions(
        column_types={names[column]: pa.large_string() for column in wanted},
        include_columns=[names[column] for column in sorted(wanted)],
        strings_can_be_null=False,
    )
    parse = pcsv.ParseOptions(
        delimiter=dialect.delimiter,
        quote_char='"' if dialect.quoted else False,
        newlines_in_values=dialect.quoted,
    )
    read = pcsv.ReadOptions(column_names=names, skip_rows=dialect.header_lines, block_size=16 << 20)
    try:
        with source.open(advance) as stream:
            scan = _Scan(stream)
            for table in pcsv.open_csv(scan, read_options=read, parse_options=parse, convert_options=convert):
                staged.add(_batch(table, names, layout), source.path, part)
    except (pa.ArrowInvalid, InputError, UnicodeDecodeError):
        return False
    return not scan.nul and not (dialect.quoted and scan.quotes % 2)


def _batch(table: pa.RecordBatch, names: list[str], layout: Layout) -> Batch:
    def column(at: int) -> pa.Array:
        return table.column(names[at])

    weights = np.ones(table.num_rows)
    if layout.weight is not None:
        weights = pc.cast(column(layout.weight), pa.float64()).to_numpy(zero_copy_only=False)
        if not np.isfinite(weights).all():
            raise pa.ArrowInvalid("a weight is no finite number")
    return Batch(
        column(layout.query),
        column(layout.phrase),
        weights,
        np.zeros(table.num_rows, dtype=np.int64),
        None if layout.match_type is None else column(layout.match_type),
        extras={name: column(at) for name, at in layout.extras.items()},
    )


def _read_carefully(
    source: Source,
    dialect: Dialect,
    layout: Layout,
    rows: RowBuffer,
    advance: Callable[[int], None] | None,
) -> None:
    query, phrase, weight_at, match_at = layout.query, layout.phrase, layout.weight, layout.match_type
    extras = list(layout.extras.values())
    try:
        with source.open(advance) as stream:
            lines = text_lines(stream, dialect.encoding)
            for _ in range(dialect.header_lines):
                next(lines)
            for at, cells in split_rows(lines, dialect.delimiter, dialect.quoted):
                line = at + dialect.header_lines
                reason = cells if isinstance(cells, str) else _row_fault(cells, layout)
                if reason is not None or isinstance(cells, str):
                    rows.bad(reason or "", line)
                    continue
                weight = 1.0 if weight_at is None else _weight(cells[weight_at])
                if weight is None:
                    rows.bad(f"the weight {cells[cast(int, weight_at)][:40]!r} is not a number", line)
                    continue
                match_type = "" if match_at is None else cells[match_at]
                rows.add(line, cells[query], cells[phrase], weight, match_type, [cells[at] for at in extras])
            rows.flush()
    except UnicodeDecodeError:
        raise undecodable(source, dialect.encoding) from None


def _weight(cell: str) -> float | None:
    if cell.isascii() and cell.isdecimal():
        return float(cell)
    return parse_number(cell, whole=False) if cell.strip() else float("nan")


def _row_fault(cells: list[str], layout: Layout) -> str | None:
    if len(cells) != layout.width:
        return f"the line has {len(cells)} columns where there should be {layout.width}"
    if any("\0" in cell for cell in cells):
        return "the line contains a NUL byte: the file is damaged, or binary"
    return None
