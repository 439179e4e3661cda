"""Files of matches, as `bidmatch score` writes them or another service gave them, read in chunks."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, csv_reason, decode_head, detect_encoding
from bidmatch.base.reports import canonical
from service.scoring.layout import DELIMITERS, QUERY_NAMES, packed, quotes_fit, table_reader
from service.scoring.queries import CHUNK_ROWS, LINE_CHARS, BadLines, Lines

SCHEMA = pa.schema(
    [
        ("query", pa.large_string()),
        ("phrase", pa.large_string()),
        ("id", pa.large_string()),
        ("rank", pa.int64()),
    ]
)
_NAMES = {
    "query": QUERY_NAMES,
    "phrase": ("phrase", "keyword", "bidphrase"),
    "id": ("id", "phraseid", "keywordid"),
    "rank": ("rank",),
}
_INT64 = range(-(1 << 63), 1 << 63)
_UTF8 = "Save the file as UTF-8."
_Row = tuple[int, Any, Any, Any, Any]  # line, query, phrase, id, rank


@dataclass(frozen=True)
class Columns:
    """How a file names what it holds; None for what it does not."""

    query: str
    phrase: str | None
    id: str | None
    rank: str | None

    def __str__(self) -> str:
        names = zip(_NAMES, astuple(self), strict=True)
        return ", ".join(f"{what} in {name!r}" for what, name in names if name is not None)


@dataclass(frozen=True)
class MatchFile:
    """A file of matches and how it is read.

    Attributes:
        source: the file.
        name: of the format, for people.
        columns: what it holds.
        encoding: codec of text.
        delimiter: of a table; "" for JSON lines and Parquet.
        quoted: whether `"` quotes a table's cells.
        headers: of a table.
    """

    source: Source
    name: str
    columns: Columns
    encoding: str = "utf-8"
    delimiter: str = ""
    quoted: bool = False
    headers: tuple[str, ...] = ()

    def tables(self, bad: BadLines, advance: Callable[[int], None]) -> Iterator[pa.Table]:
        """Chunks of the matches, of `SCHEMA`, in the file's order; rows without phrase and id are left out.

        Args:
            bad: what to do with bad lines.
            advance: told of the bytes of the file that are read.

        Raises:
            InputError: a line is bad and bad lines stop, or the file is damaged.
        """
        if self.source.kind == "parquet":
            yield from _parquet(self, bad, advance)
            return
        rows = _table_rows if self.delimiter else _json_rows
        with self.source.open(advance) as stream:
            yield from _chunks(self, rows(self, stream, bad), bad)


def recognise_matches(source: Source) -> MatchFile:
    """Find format and columns of a file.

    Raises:
        InputError: it has no column of queries, or none of phrases or ids.
    """
    if source.kind == "parquet":
        return _parquet_layout(source)
    encoding = detect_encoding(source, None)
    head = decode_head(source, encoding)
    first = next((line for line in head.split("\n") if line.strip()), "").rstrip("\r")
    if first.lstrip().startswith(("[", "{")):
        try:
            value = orjson.loads(first)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise InputError(
                "starts like JSON, but its first line is no JSON object",
                file=source.path,
                line=1,
                hint='Each line of JSONL is a match, such as {"query": "red hose", "phrase": "garden hose"}.',
            )
        return MatchFile(source, f"JSONL{packed(source)}", _columns(source, list(value)), encoding)
    tables = []
    for delimiter in DELIMITERS:
        quoted = delimiter != "\t" or '"' not in head or quotes_fit(head)
        headers = next(table_reader(io.StringIO(first, newline=""), delimiter, quoted))
        tables.append((delimiter, quoted, tuple(headers)))
    known = {name for names in _NAMES.values() for name in names}
    # Of those that know as many names, tabs come first.
    delimiter, quoted, headers = max(tables, key=lambda one: sum(canonical(name) in known for name in one[2]))
    return MatchFile(
        source,
        f"{DELIMITERS[delimiter]}{packed(source)}",
        _columns(source, headers),
        encoding,
        delimiter,
        quoted,
        headers,
    )


def _columns(source: Source, headers: Sequence[str]) -> Columns:
    found: dict[str, str | None] = {}
    for what, names in _NAMES.items():
        alike = [header for name in names for header in headers if canonical(header) == name]
        if len(alike) > 1 and canonical(alike[0]) == canonical(alike[1]):
            raise InputError(f"two columns are named {alike[0]!r}", file=source.path, hint="Rename one.")
        found[what] = alike[0] if alike else None
    query = found.pop("query")
    if query is None or (found["phrase"] is None and found["id"] is None):
        shown = ", ".join(header.strip()[:40] or "(no name)" for header in headers[:12])
        missing = "'query'" if query is None else "'phrase' or 'id'"
        raise InputError(
            f"has no column {missing} (there are: {shown})",
            file=source.path,
            hint="A file of matches has a header line or field names: query, and phrase or id or both; "
            "rank, from 1, where rows are not in order.",
        )
    return Columns(query, **found)


def _table_rows(file: MatchFile, stream: BinaryIO, bad: BadLines) -> Iterator[_Row]:
    csv.field_size_limit(LINE_CHARS)
    lines = Lines(file.source, file.encoding, stream, bad)
    reader = table_reader(iter(lines), file.delimiter, file.quoted, strict=True)
    places = [None if name is None else file.headers.index(name) for name in astuple(file.columns)]
    headed = False
    while True:
        before = reader.line_num
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            bad.meet(file.source, lines.number - (reader.line_num - before) + 1, csv_reason(str(problem)))
            continue
        line = lines.number - (reader.line_num - before) + 1
        if not any(cell.strip() for cell in cells):
            continue
        if not headed:
            headed = True
        elif len(cells) == len(file.headers):
            query, phrase, one_id, rank = (None if at is None else cells[at] for at in places)
            yield line, query, phrase, one_id, rank
        else:
            reason = f"has {len(cells)} cells where the header line has {len(file.headers)}"
            bad.meet(file.source, line, reason, "Is the delimiter inside a text? Then it must be in quotes.")


def _json_rows(file: MatchFile, stream: BinaryIO, bad: BadLines) -> Iterator[_Row]:
    lines = Lines(file.source, file.encoding, stream, bad)
    for text in lines:
        if not text.strip():
            continue
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as problem:
            bad.meet(file.source, lines.number, f"is not valid JSON ({problem.msg})")
            continue
        if not isinstance(value, dict) or file.columns.query not in value:
            bad.meet(file.source, lines.number, f"is no JSON object with the field {file.columns.query!r}")
            continue
        query, phrase, one_id, rank = (
            None if name is None else value.get(name) for name in astuple(file.columns)
        )
        yield lines.number, query, phrase, one_id, rank


def _chunks(file: MatchFile, rows: Iterator[_Row], bad: BadLines) -> Iterator[pa.Table]:
    chunk: list[_Row] = []
    for line, *values in rows:
        try:
            row = _checked(file, *values)
        except _FaultError as fault:
            bad.meet(file.source, line, str(fault), fault.hint)
            continue
        if row is not None:
            chunk.append((line, *row))
        if len(chunk) == CHUNK_ROWS:
            yield _table(chunk)
            chunk = []
    if chunk:
        yield _table(chunk)


class _FaultError(Exception):
    """Why a line is bad."""

    def __init__(self, reason: str, hint: str | None = None):
        self.hint = hint
        super().__init__(reason)


def _checked(
    file: MatchFile, query: Any, phrase: Any, one_id: Any, rank: Any
) -> tuple[str, str | None, str | None, int] | None:
    """A row's values, or None where it says that a query has no match."""
    columns = file.columns
    if isinstance(one_id, int) and not isinstance(one_id, bool):
        one_id = str(one_id)
    for name, value in ((columns.query, query), (columns.phrase, phrase), (columns.id, one_id)):
        if value is not None and not isinstance(value, str):
            raise _FaultError(f"column {name!r} holds no text but {str(value)[:40]}")
        # Bytes that could not be decoded came through as lone surrogates.
        if value is not None and not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
            raise _FaultError(
                f"column {name!r} is no {file.encoding.removesuffix('-sig').upper()} text", _UTF8
            )
    phrase = phrase if phrase and phrase.strip() else None
    one_id = one_id if one_id and one_id.strip() else None
    if phrase is None and one_id is None:
        return None
    for name, value in ((columns.phrase, phrase), (columns.id, one_id)):
        if name is not None and value is None:
            raise _FaultError(f"column {name!r} is empty", "A match has all that the file has columns for.")
    return query or "", phrase, one_id, 0 if columns.rank is None else _rank(columns.rank, rank)


def _rank(name: str, value: Any) -> int:
    try:
        if isinstance(value, str):
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value in _INT64:
            return value
    except ValueError:
        pass
    shown = "nothing" if value in (None, "") else repr(value)[:40]
    raise _FaultError(f"column {name!r} holds {shown} and not a whole number")


def _table(rows: list[_Row]) -> pa.Table:
    _, *values = zip(*rows, strict=True)
    return pa.table(
        [pa.array(column, kind) for column, kind in zip(values, SCHEMA.types, strict=True)], SCHEMA
    )


def _parquet_layout(source: Source) -> MatchFile:
    try:
        with pq.ParquetFile(source.path) as file:
            schema = file.schema_arrow
    except (pa.ArrowException, OSError) as problem:
        raise _damaged(source, problem) from problem
    columns = _columns(source, schema.names)
    for what, name in zip(_NAMES, astuple(columns), strict=True):
        if name is None:
            continue
        kind = schema.field(name).type
        inner = kind.value_type if pa.types.is_dictionary(kind) else kind
        text = pa.types.is_string(inner) or pa.types.is_large_string(inner)
        whole = pa.types.is_integer(inner)
        if not (whole if what == "rank" else text or (what == "id" and whole)):
            raise InputError(
                f"column {name!r} holds {kind}, not {'whole numbers' if what == 'rank' else 'text'}",
                file=source.path,
            )
    return MatchFile(source, "Parquet", columns)


def _parquet(file: MatchFile, bad: BadLines, advance: Callable[[int], None]) -> Iterator[pa.Table]:
    source, names = file.source, astuple(file.columns)
    read = list(dict.fromkeys(name for name in names if name is not None))
    try:
        with pq.ParquetFile(source.path, buffer_size=1 << 20) as parquet:
            per_row = source.path.stat().st_size / max(parquet.metadata.num_rows, 1)
            before = 0
            for batch in parquet.iter_batches(CHUNK_ROWS, columns=read, use_threads=False):
                advance(round(batch.num_rows * per_row))
                columns = [
                    pa.nulls(batch.num_rows, kind)
                    if name is None
                    else _plain(batch.column(batch.schema.get_field_index(name))).cast(kind)
                    for name, kind in zip(names, SCHEMA.types, strict=True)
                ]
                table = pa.table(columns, SCHEMA)
                table.validate(full=True)
                yield _sound(file, table, before, bad)
                before += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise _damaged(source, problem) from problem


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


def _sound(file: MatchFile, table: pa.Table, before: int, bad: BadLines) -> pa.Table:
    """The table's matches, bad rows left to `bad`.

    Args:
        file: where it is from.
        table: of `SCHEMA`.
        before: rows of the file before it.
        bad: what to do with bad rows.
    """
    columns = file.columns
    query = pc.fill_null(table["query"], "")
    long = pc.greater(pc.binary_length(query), LINE_CHARS).to_numpy()
    filled = {name: _filled(table[name]) for name in ("phrase", "id")}
    matched = filled["phrase"] | filled["id"]
    faults = [(long, f"the query is longer than {LINE_CHARS:,} bytes")]
    faults += [
        (matched & ~filled[what], f"column {name!r} is empty")
        for what, name in (("phrase", columns.phrase), ("id", columns.id))
        if name is not None
    ]
    rank = table["rank"]
    if columns.rank is None:
        rank = pa.array(np.zeros(len(table), np.int64))
    else:
        faults.append((matched & rank.is_null().to_numpy(), f"column {columns.rank!r} is empty"))
    wrong = np.zeros(len(table), bool)
    for mask, reason in faults:
        for row in np.flatnonzero(mask & ~wrong).tolist():
            bad.meet(file.source, before + row + 1, reason)
        wrong |= mask
    return pa.table([query, table["phrase"], table["id"], rank], SCHEMA).filter(pa.array(matched & ~wrong))


def _filled(column: pa.ChunkedArray) -> np.ndarray:
    texts = pc.utf8_trim_whitespace(pc.fill_null(column, ""))
    found: np.ndarray = pc.not_equal(texts, "").to_numpy()
    return found


def _damaged(source: Source, problem: Exception) -> InputError:
    return InputError(
        f"the Parquet file is damaged or cut short ({str(problem).splitlines()[0]})",
        file=source.path,
        hint="Write or copy it again.",
    )


def same_columns(files: Sequence[tuple[Path, Columns]]) -> None:
    """Refuse files of one set that hold different columns.

    Raises:
        InputError: a file lacks a column that another has.
    """
    for what in ("phrase", "id", "rank"):
        having = [(path, getattr(columns, what) is not None) for path, columns in files]
        lacking = next((path for path, has in having if not has), None)
        other = next((path for path, has in having if has), None)
        if lacking is not None and other is not None:
            raise InputError(
                f"has no column {what!r}, which {other} has",
                file=lacking,
                hint="All files of one side need the same columns.",
            )
