"""Files of matches, as `bidmatch score` writes them or another service gave them: formats and columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, decode_head, detect_encoding
from bidmatch.base.reports import canonical
from service.scoring.layout import DELIMITERS, QUERY_NAMES, packed, quotes_fit, table_reader

_NAMES = {
    "query": QUERY_NAMES,
    "phrase": ("phrase", "keyword", "bidphrase"),
    "id": ("id", "phraseid", "keywordid"),
    "rank": ("rank",),
}


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
        cells = next(table_reader(io.StringIO(first, newline=""), delimiter, quoted))
        tables.append((delimiter, quoted, tuple(cells)))
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


def _parquet_layout(source: Source) -> MatchFile:
    try:
        with pq.ParquetFile(source.path) as file:
            schema = file.schema_arrow
    except (pa.ArrowException, OSError) as problem:
        raise damaged(source, problem) from problem
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


def damaged(source: Source, problem: Exception) -> InputError:
    """The error of a Parquet file that cannot be read."""
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
