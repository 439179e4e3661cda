"""The queries of a log, streamed in chunks of bounded size."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, csv_reason
from service.scoring.layout import Layout, table_reader

CHUNK_ROWS = 32_768
_CHUNK_CHARS = 1 << 24
_LINE_CHARS = 1 << 20
_READ_BYTES = 1 << 20


@dataclass
class BadLines:
    """What becomes of lines that hold no query.

    Attributes:
        skip: count them, instead of stopping at the first.
        count: how many there were.
        first: where and why the first was one.
    """

    skip: bool
    count: int = 0
    first: str = ""

    def meet(self, source: Source, line: int, reason: str, hint: str | None = None) -> None:
        """Raises InputError, or counts the line."""
        error = InputError(reason, file=source.path, line=line, hint=hint)
        if not self.skip:
            raise error
        self.count += 1
        self.first = self.first or f"{source.path}, line {line}: {reason}"


def read_queries(
    source: Source, layout: Layout, bad: BadLines, advance: Callable[[int], None]
) -> Iterator[list[str]]:
    """Chunks of queries as given, in the file's order; a null is an empty query.

    Args:
        source: the file.
        layout: where its queries stand.
        bad: what to do with bad lines.
        advance: told of the bytes of the file that are read.

    Raises:
        InputError: a line is bad and bad lines stop, or the file is damaged.
    """
    if layout.kind == "parquet":
        yield from _parquet(source, layout, advance)
        return
    with source.open(advance) as stream:
        if layout.kind in ("objects", "strings"):
            rows = _json_rows(source, layout, stream, bad)
        elif layout.kind == "table":
            rows = _table_rows(source, layout, stream, bad)
        else:
            rows = _line_rows(source, layout, stream)
        yield from _chunks(source, layout, rows, bad)


def _parquet(source: Source, layout: Layout, advance: Callable[[int], None]) -> Iterator[list[str]]:
    try:
        with pq.ParquetFile(source.path, buffer_size=_READ_BYTES) as file:
            per_row = source.path.stat().st_size / max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(CHUNK_ROWS, columns=[layout.column], use_threads=False):
                advance(round(batch.num_rows * per_row))
                yield [query or "" for query in batch.column(0).to_pylist()]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise InputError(
            f"the Parquet file is damaged ({str(problem).splitlines()[0]})",
            file=source.path,
            hint="Write or copy it again.",
        ) from problem


def _chunks(
    source: Source, layout: Layout, rows: Iterator[tuple[int, str]], bad: BadLines
) -> Iterator[list[str]]:
    """Chunks of rows (line, query), those that are no text in the encoding left to `bad`."""
    queries: list[str] = []
    lines: list[int] = []
    chars = 0
    for line, query in rows:
        queries.append(query)
        lines.append(line)
        chars += len(query)
        if len(queries) >= CHUNK_ROWS or chars >= _CHUNK_CHARS:
            yield _sound(source, layout, queries, lines, bad)
            queries, lines, chars = [], [], 0
    if queries:
        yield _sound(source, layout, queries, lines, bad)


def _sound(source: Source, layout: Layout, queries: list[str], lines: list[int], bad: BadLines) -> list[str]:
    try:
        "".join(queries).encode()
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
        return kept
    return queries


_ENCODING = (
    "Save the file as UTF-8, or name its encoding: --encoding cp1252 suits files from Excel on Windows."
)


@contextmanager
def _text(source: Source, layout: Layout, stream: BinaryIO) -> Iterator[Iterator[str]]:
    """The lines of a text file, their ends kept, none longer than is sensible."""
    wide = layout.encoding.startswith(("utf-16", "utf-32"))
    errors = "strict" if wide else "surrogateescape"
    reader = io.TextIOWrapper(stream, encoding=layout.encoding, errors=errors, newline="")
    line = 0

    def lines() -> Iterator[str]:
        nonlocal line
        while text := reader.readline(_LINE_CHARS):
            line += 1
            if len(text) == _LINE_CHARS:
                raise InputError(
                    f"the line is longer than {_LINE_CHARS:,} characters: no query log",
                    file=source.path,
                    line=line,
                )
            yield text.removeprefix("\ufeff") if line == 1 else text

    try:
        yield lines()
    except UnicodeError as problem:
        raise InputError(
            f"is no {layout.encoding.upper()} text ({problem})",
            file=source.path,
            line=line + 1,
            hint=_ENCODING,
        ) from problem


def _line_rows(source: Source, layout: Layout, stream: BinaryIO) -> Iterator[tuple[int, str]]:
    with _text(source, layout, stream) as lines:
        for number, line in enumerate(lines, 1):
            if number > layout.header_lines:
                yield number, line.rstrip("\r\n")


def _table_rows(source: Source, layout: Layout, stream: BinaryIO, bad: BadLines) -> Iterator[tuple[int, str]]:
    csv.field_size_limit(_LINE_CHARS)
    with _text(source, layout, stream) as lines:
        for _ in range(layout.header_lines):
            next(lines, None)
        reader = table_reader(lines, layout.delimiter, layout.quoted, strict=True)
        width, position, before = layout.width, layout.position, layout.header_lines
        while True:
            line = before + reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as problem:
                bad.meet(source, line, csv_reason(str(problem)))
                continue
            if len(cells) == width:
                yield line, cells[position]
            elif cells and any(cells):
                reason = f"has {len(cells)} cells where there are {width} elsewhere"
                bad.meet(
                    source, line, reason, "Is the delimiter inside a text? Then the text must be in quotes."
                )
            elif width == 1:
                yield line, ""


def _json_rows(source: Source, layout: Layout, stream: BinaryIO, bad: BadLines) -> Iterator[tuple[int, str]]:
    strings, column = layout.kind == "strings", layout.column
    with _text(source, layout, stream) as lines:
        for line, text in enumerate(lines, 1):
            if not text.strip():
                continue
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
