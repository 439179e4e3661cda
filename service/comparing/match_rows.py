"""The rows of files of matches, in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bidmatch.base.tables import table_records
from service.comparing.match_files import MatchFile, damaged
from service.scoring.queries import CHUNK_ROWS, LINE_CHARS, BadLines, Lines

SCHEMA = pa.schema(
    [
        ("query", pa.large_string()),
        ("phrase", pa.large_string()),
        ("id", pa.large_string()),
        ("rank", pa.int64()),
    ]
)
_INT64 = range(-(1 << 63), 1 << 63)
_UTF8 = "Save the file as UTF-8."
_Row = tuple[int, Any, Any, Any, Any]  # line, query, phrase, id, rank


def read_matches(file: MatchFile, bad: BadLines, advance: Callable[[int], None]) -> Iterator[pa.Table]:
    """Chunks of the matches, of `SCHEMA`, in the file's order; rows without phrase and id are left out.

    Args:
        file: what is read, and how.
        bad: what to do with bad lines.
        advance: told of the bytes of the file that are read.

    Raises:
        InputError: a line is bad and bad lines stop, or the file is damaged.
    """
    if file.source.kind == "parquet":
        yield from _parquet(file, bad, advance)
        return
    rows = _table_rows if file.delimiter else _json_rows
    with file.source.open(advance) as stream:
        yield from _chunks(file, rows(file, stream, bad), bad)


def _table_rows(file: MatchFile, stream: BinaryIO, bad: BadLines) -> Iterator[_Row]:
    lines = Lines(file.source, file.encoding, stream, bad)
    places = [None if name is None else file.headers.index(name) for name in astuple(file.columns)]
    headed, width = False, len(file.headers)
    for line, cells in table_records(lines.numbered(), file.delimiter, quoted=file.quoted):
        if isinstance(cells, str):
            bad.meet(file.source, line, cells)
            continue
        if not any(cells) or not any(map(str.strip, cells)):
            continue
        if not headed:
            headed = True
        elif len(cells) == width:
            query, phrase, one_id, rank = (None if at is None else cells[at] for at in places)
            yield line, query, phrase, one_id, rank
        else:
            reason = f"has {len(cells)} cells where the header line has {width}"
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
        raise damaged(source, problem) from problem


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
