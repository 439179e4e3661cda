"""The queries of a log, streamed in chunks of bounded size."""

from __future__ import annotations

import codecs
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bidmatch.base.console import say
from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source
from bidmatch.base.tables import table_records
from service.scoring.layout import Layout, recognise
from service.scoring.reports import ReportRows
from service.scoring.source import open_log

CHUNK_ROWS = 32_768
_CHUNK_CHARS = 1 << 24
LINE_CHARS = 1 << 20
"""Characters that a line, or a query in Parquet, may have."""
_READ_BYTES = 1 << 20


@dataclass
class BadLines:
    """What becomes of lines that hold no query.

    Attributes:
        skip: count them, instead of stopping at the first.
        count: how many there were.
        first: where and why the first was one.
        left_out: rows of ads reports that hold no query, by reason; they are not bad.
    """

    skip: bool
    count: int = 0
    first: str = ""
    left_out: Counter[str] = field(default_factory=Counter)

    def meet(self, source: Source, line: int, reason: str, hint: str | None = None) -> None:
        """Raises InputError, or counts the line."""
        error = InputError(reason, file=source.path, line=line, hint=hint)
        if not self.skip:
            raise error
        self.count += 1
        self.first = self.first or f"{source.path}, line {line}: {reason}"


def read_log(
    files: Iterable[Path],
    query_column: str | None,
    encoding: str | None,
    bad: BadLines,
    advance: Callable[[int], None],
) -> Iterator[pa.Array]:
    """Chunks of the queries of all files, saying of each how it is read.

    Args:
        files: of the log, in order.
        query_column: see `recognise`.
        encoding: likewise.
        bad: what to do with bad lines.
        advance: told of the bytes that are read.

    Raises:
        InputError: a file is no query log, is damaged, or a line is bad and bad lines stop.
    """
    for file in files:
        source = open_log(file)
        if source is None:
            say(f"{file}: empty")
            continue
        layout = recognise(source, query_column, encoding)
        say(f"{file}: {layout.name}, queries in {layout.column!r}")
        yield from read_queries(source, layout, bad, advance)


def read_queries(
    source: Source, layout: Layout, bad: BadLines, advance: Callable[[int], None]
) -> Iterator[pa.Array]:
    """Chunks of queries as given, large_string without nulls, in the file's order; a null is an empty query.

    Args:
        source: the file.
        layout: where its queries stand.
        bad: what to do with bad lines.
        advance: told of the bytes of the file that are read.

    Raises:
        InputError: a line is bad and bad lines stop, or the file is damaged.
    """
    if layout.kind == "parquet":
        yield from _parquet(source, layout, bad, advance)
        return
    with source.open(advance) as stream:
        if layout.kind in ("lines", "table") and not layout.headers and layout.encoding.startswith("utf-8"):
            yield from _blocks(source, layout, stream, bad)
        else:
            yield from _chunks(source, layout, Lines(source, layout.encoding, stream, bad), bad)


def _parquet(
    source: Source, layout: Layout, bad: BadLines, advance: Callable[[int], None]
) -> Iterator[pa.Array]:
    try:
        with pq.ParquetFile(source.path, buffer_size=_READ_BYTES) as file:
            per_row = source.path.stat().st_size / max(file.metadata.num_rows, 1)
            row = 0
            for batch in file.iter_batches(CHUNK_ROWS, columns=[layout.column], use_threads=False):
                advance(round(batch.num_rows * per_row))
                queries = batch.column(0).cast(pa.large_string()).fill_null("")
                queries.validate(full=True)
                long = pc.greater(pc.binary_length(queries), LINE_CHARS)
                if pc.any(long).as_py():
                    for at in np.flatnonzero(long.to_numpy(zero_copy_only=False)).tolist():
                        bad.meet(
                            source, row + at + 1, f"the query is longer than {LINE_CHARS:,} bytes", _LONG
                        )
                    queries = queries.filter(pc.invert(long))
                row += batch.num_rows
                yield queries
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise InputError(
            f"the Parquet file is damaged ({str(problem).splitlines()[0]})",
            file=source.path,
            hint="Write or copy it again.",
        ) from problem


def _blocks(source: Source, layout: Layout, stream: BinaryIO, bad: BadLines) -> Iterator[pa.Array]:
    """UTF-8 lines and tables, a block at a time by whole columns; what is not plain goes the careful way."""
    line, rest, ended = 0, b"", False
    while not ended:
        block = stream.read(_READ_BYTES)
        ended = not block
        if not line and not rest:
            block = block.removeprefix(codecs.BOM_UTF8)
        rest += block
        cut = rest.rfind(b"\n") + 1 if not ended else len(rest)
        whole = rest[:cut] + (b"\n" if ended and not rest.endswith(b"\n") else b"")
        if not cut:
            # A line without an end in sight.
            if len(rest) > 4 * LINE_CHARS:
                lines = Lines(source, layout.encoding, cast(BinaryIO, _Joined(rest, stream)), bad, line)
                yield from _chunks(source, layout, lines, bad)
                return
            continue
        rest = rest[cut:]
        queries = _plain_queries(layout, whole, line)
        if queries is not None:
            line += whole.count(b"\n")
            for start in range(0, len(queries), CHUNK_ROWS):
                yield queries.slice(start, CHUNK_ROWS)
            continue
        # A quoted cell may go on in the next block.
        onward = io.BytesIO(whole) if not layout.quoted else _Joined(whole + rest, stream)
        lines = Lines(source, layout.encoding, cast(BinaryIO, onward), bad, line)
        yield from _chunks(source, layout, lines, bad)
        if layout.quoted:
            return
        line = lines.number


def _plain_queries(layout: Layout, block: bytes, before: int) -> pa.Array | None:
    """The queries of whole lines of UTF-8; None where a line is bad, quoted, or unlike the others.

    Args:
        layout: of the file.
        block: the lines, each with its end.
        before: lines of the file before these.
    """
    if b"\r" in block and block.count(b"\r") != block.count(b"\r\n"):
        return None
    if before < layout.header_lines:
        block = b"".join(block.split(b"\n", layout.header_lines - before)[layout.header_lines - before :])
    if layout.kind == "table" and (b"\0" in block or (layout.quoted and b'"' in block)):
        return None
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    if len(ends) and np.diff(offsets).max() > LINE_CHARS:
        return None
    lines = pa.LargeStringArray.from_buffers(len(ends), pa.py_buffer(offsets), pa.py_buffer(block))
    if not block.isascii():
        try:
            lines.validate(full=True)
        except pa.ArrowInvalid:
            return None
    lines = pc.ascii_rtrim(lines, characters="\r\n")
    if layout.kind == "lines":
        return lines
    if pc.any(pc.not_equal(pc.count_substring(lines, layout.delimiter), layout.width - 1)).as_py():
        return None
    if layout.width == 1:
        return lines
    cells = pc.split_pattern(lines, layout.delimiter, max_splits=layout.position + 1)
    return pc.list_element(cells, layout.position)


class _Joined(io.RawIOBase):
    """Bytes that were read already, and then the stream they are from."""

    def __init__(self, read: bytes, stream: BinaryIO):
        self._read, self._stream = memoryview(read), stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        block = self._read[: len(buffer)] if len(self._read) else self._stream.read(len(buffer))
        self._read = self._read[len(buffer) :]
        buffer[: len(block)] = block
        return len(block)


_ENCODING = (
    "Save the file as UTF-8, or name its encoding: --encoding cp1252 suits files from Excel on Windows."
)
_LONG = "No query log has such; remove it, or leave it out with --bad-lines skip."


class Lines:
    """The lines of a text stream, their ends kept; those that are too long are left to `bad`.

    Bytes that are no text of an encoding of one byte a unit come as lone surrogates.

    Args:
        source: the file.
        encoding: its codec.
        stream: its bytes, or those of some of its lines.
        bad: what to do with bad lines.
        number: lines of the file before the stream's.

    Attributes:
        number: of the line that was given last, from 1.
    """

    def __init__(self, source: Source, encoding: str, stream: BinaryIO, bad: BadLines, number: int = 0):
        self.number = number
        self._source, self._encoding, self._bad = source, encoding, bad
        errors = "strict" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
        self._reader = io.TextIOWrapper(stream, encoding=encoding, errors=errors, newline="")

    def __iter__(self) -> Iterator[str]:
        try:
            while text := self._reader.readline(LINE_CHARS):
                self.number += 1
                if len(text) == LINE_CHARS and text[-1] not in "\r\n":
                    self._bad.meet(
                        self._source, self.number, f"the line is longer than {LINE_CHARS:,} characters", _LONG
                    )
                    while (more := self._reader.readline(LINE_CHARS)) and more[-1] not in "\r\n":
                        pass
                    continue
                yield text.removeprefix("\ufeff") if self.number == 1 else text
        except UnicodeError as problem:
            raise InputError(
                f"is no {self._encoding.upper()} text ({problem})",
                file=self._source.path,
                line=self.number + 1,
                hint=_ENCODING,
            ) from problem

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Each line with its number."""
        for text in self:
            yield self.number, text


def _chunks(source: Source, layout: Layout, lines: Lines, bad: BadLines) -> Iterator[pa.Array]:
    """Chunks of queries, those that are no text in the encoding left to `bad`."""
    if layout.kind in ("objects", "strings"):
        rows = _json_rows(source, layout, lines, bad)
    elif layout.kind == "table":
        rows = _table_rows(source, layout, lines, bad)
    else:
        rows = _line_rows(layout, lines)
    queries: list[str] = []
    numbers: list[int] = []
    chars = 0
    for number, query in rows:
        queries.append(query)
        numbers.append(number)
        chars += len(query)
        if len(queries) >= CHUNK_ROWS or chars >= _CHUNK_CHARS:
            yield _sound(source, layout, queries, numbers, bad)
            queries, numbers, chars = [], [], 0
    if queries:
        yield _sound(source, layout, queries, numbers, bad)


def _sound(source: Source, layout: Layout, queries: list[str], lines: list[int], bad: BadLines) -> pa.Array:
    try:
        return pa.array(queries, pa.large_string())
    except UnicodeEncodeError:
        kept = []
        for line, query in zip(lines, queries, strict=True):
            # Bytes that could not be decoded came through as lone surrogates.
            if any("\ud800" <= character <= "\udfff" for character in query):
                bad.meet(
                    source, line, f"is no {layout.encoding.removesuffix('-sig').upper()} text", _ENCODING
                )
            else:
                kept.append(query)
        return pa.array(kept, pa.large_string())


def _line_rows(layout: Layout, lines: Lines) -> Iterator[tuple[int, str]]:
    for line in lines:
        if lines.number > layout.header_lines:
            yield lines.number, line.rstrip("\r\n")


def _table_rows(source: Source, layout: Layout, lines: Lines, bad: BadLines) -> Iterator[tuple[int, str]]:
    report = ReportRows(layout.headers, layout.position) if layout.headers else None
    texts = lines.numbered()
    while lines.number < layout.header_lines and next(texts, None) is not None:
        pass
    width, position = layout.width, layout.position
    for line, cells in table_records(texts, layout.delimiter, quoted=layout.quoted):
        if isinstance(cells, str):
            bad.meet(source, line, cells)
            continue
        if report is not None:
            if not any(cell.strip() for cell in cells) or report.apart(cells):
                continue
            if len(cells) > width and not any(cell.strip() for cell in cells[width:]):
                del cells[width:]
        if len(cells) == width:
            query = cells[position] if report is None else report.query(cells)
            if query is not None:
                yield line, query
        elif cells and any(cells):
            reason = f"has {len(cells)} cells where there are {width} elsewhere"
            bad.meet(source, line, reason, "Is the delimiter inside a text? Then the text must be in quotes.")
        elif width == 1:
            yield line, ""
    if report is not None:
        bad.left_out.update(report.left_out)


def _json_rows(source: Source, layout: Layout, lines: Lines, bad: BadLines) -> Iterator[tuple[int, str]]:
    strings, column = layout.kind == "strings", layout.column
    for text in lines:
        if not text.strip():
            continue
        line = lines.number
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as problem:
            bad.meet(source, line, f"is not valid JSON ({problem.msg})")
            continue
        if not strings:
            if not isinstance(value, dict) or column not in value:
                bad.meet(source, line, f"is no JSON object with the field {column!r}")
                continue
            value = value[column]
        if value is not None and not isinstance(value, str):
            bad.meet(source, line, f"the query is no text but {str(value)[:40]}")
            continue
        yield line, value or ""
