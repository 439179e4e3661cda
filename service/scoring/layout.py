"""Where the queries stand in a query log: format and column, recognised by content."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bidmatch.base import text
from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, decode_head, detect_encoding

QUERY_NAMES = (
    "query",
    "searchquery",
    "searchterm",
    "userquery",
    "customersearchterm",
    "q",
    "querytext",
    "search",
)
_OTHER_NAMES = ("phrase", "keyword", "clicks", "impressions", "weight", "count", "date", "timestamp", "id")
_DELIMITERS = {"\t": "TSV", ",": "CSV", ";": "CSV with semicolons", "|": "CSV with bars"}
_NOT_A_WORD = re.compile(r"[\W_]+")
_REPORT_HINT = (
    "Of an ads platform's report, write the plain log first: bidmatch data REPORT --write queries.tsv"
)

if TYPE_CHECKING:
    from _csv import Reader as _Reader

Kind = Literal["parquet", "objects", "strings", "table", "lines"]
_Row = tuple[str, bool, int, list[str]]  # delimiter, whether quoted, first line, cells


@dataclass(frozen=True)
class Layout:
    """How to get the queries out of a file.

    Attributes:
        kind: `parquet`; `objects`, JSON lines with a field; `strings`, JSON lines that are strings; `table`,
            delimited cells; `lines`, a query a line.
        name: the format, for people.
        column: the query's column or field; for a table without a header line its position, from 1.
        encoding: codec of text.
        delimiter: of a table.
        quoted: whether `"` quotes a table's cells.
        position: index of a table's query cell.
        width: cells of a table's row.
        header_lines: lines before the first query.
    """

    kind: Kind
    name: str
    column: str = ""
    encoding: str = "utf-8"
    delimiter: str = ""
    quoted: bool = False
    position: int = 0
    width: int = 1
    header_lines: int = 0


def recognise(source: Source, query_column: str | None, encoding: str | None) -> Layout:
    """Find format and query column.

    Args:
        source: the file.
        query_column: the column's header, or its position from 1; None for one of the usual names.
        encoding: codec of text; None to tell by content.

    Raises:
        ConfigError: no such encoding.
        InputError: no column holds the queries, as far as can be told.
    """
    if source.kind == "parquet":
        return _parquet(source, query_column)
    codec = detect_encoding(source, encoding)
    head = decode_head(source, codec)
    first = next((line for line in head.split("\n") if line.strip()), "").strip()
    if first.startswith('{"') or (first.startswith("{") and first.endswith("}")):
        return _objects(source, first, query_column, codec)
    if first.startswith(("[{", '["')) and source.path.suffix not in (".tsv", ".csv"):
        raise InputError(
            "is one JSON array, not JSON lines",
            file=source.path,
            hint="Write one value a line, for instance with: jq -c '.[]' file.json > file.jsonl",
        )
    if first.startswith('"') and _all_json_strings(head):
        return Layout("strings", f"JSONL strings{_packed(source)}", "value", codec)
    return _table_or_lines(source, head, query_column, codec)


def _canonical(header: str) -> str:
    return _NOT_A_WORD.sub("", text.key(header))


def _find(headers: Sequence[str], wanted: str | None, file: Path) -> int | None:
    """Index of the query's column, None where no name tells it."""
    keys = [_canonical(header) for header in headers]
    if wanted is None:
        found = [at for name in QUERY_NAMES for at, key in enumerate(keys) if key == name]
        if len(found) > 1 and keys[found[0]] == keys[found[1]]:
            raise InputError(
                f"two columns are named {headers[found[0]]!r}",
                file=file,
                hint="Say which holds the queries by its position, such as --query-column 2.",
            )
        return found[0] if found else None
    found = [at for at, header in enumerate(headers) if header.strip() == wanted.strip()]
    found = found or [at for at, key in enumerate(keys) if key and key == _canonical(wanted)]
    if len(found) > 1:
        raise InputError(f"two columns are named {wanted!r}", file=file, hint="Give its position, such as 2.")
    if found:
        return found[0]
    if wanted.isdecimal() and 1 <= int(wanted) <= len(headers):
        return int(wanted) - 1
    shown = ", ".join(header.strip()[:40] or "(no name)" for header in headers[:20])
    raise InputError(f"there is no column {wanted!r}", file=file, hint=f"The columns are: {shown}.")


def _no_query_column(source: Source, headers: Sequence[str], line: int | None = None) -> InputError:
    shown = ", ".join(header.strip()[:40] for header in headers[:12])
    return InputError(
        f"no column is named as the query ({shown})",
        file=source.path,
        line=line,
        hint="Say which holds the queries with --query-column (a name, or a position such as 1). "
        + _REPORT_HINT,
    )


def _parquet(source: Source, query_column: str | None) -> Layout:
    try:
        with pq.ParquetFile(source.path) as file:
            schema = file.schema_arrow
    except (pa.ArrowException, OSError) as problem:
        raise InputError(
            f"the Parquet file is damaged or cut short ({str(problem).splitlines()[0]})",
            file=source.path,
            hint="Write or copy it again.",
        ) from problem
    at = _find(schema.names, query_column, source.path)
    if at is None and len(schema) == 1:
        at = 0
    if at is None:
        raise _no_query_column(source, schema.names)
    kind = schema.types[at]
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(inner) or pa.types.is_large_string(inner)):
        raise InputError(
            f"column {schema.names[at]!r} holds {kind}, not text", file=source.path, hint="Write strings."
        )
    return Layout("parquet", "Parquet", schema.names[at])


def _objects(source: Source, first: str, query_column: str | None, encoding: str) -> Layout:
    try:
        value = orjson.loads(first)
    except orjson.JSONDecodeError as problem:
        raise InputError(
            f"starts like JSON lines, but its first line is not valid JSON ({problem.msg})",
            file=source.path,
            hint="JSONL has one whole JSON value on each line.",
        ) from None
    at = _find(list(value), query_column, source.path)
    if at is None:
        raise _no_query_column(source, list(value))
    return Layout("objects", f"JSONL{_packed(source)}", list(value)[at], encoding)


def _all_json_strings(head: str) -> bool:
    try:
        return all(isinstance(orjson.loads(line), str) for line in head.split("\n") if line.strip())
    except orjson.JSONDecodeError:
        return False


def _table_or_lines(source: Source, head: str, query_column: str | None, encoding: str) -> Layout:
    rows = _first_rows(head)
    found = _named_or_numbered(source, rows, query_column)
    delimiter, quoted, line, cells = rows[0]
    if found is not None:
        (delimiter, quoted, line, cells), at, headed = found
        header_lines = line + sum(cell.count("\n") for cell in cells) if headed else line - 1
        column = cells[at].strip() if headed else str(at + 1)
    elif delimiter == "\t" and len(cells) > 1:
        at, header_lines, column = 0, line - 1, "1"
    elif len(cells) > 1 and ".csv" in source.path.suffixes:
        raise _no_query_column(source, cells, line)
    elif "\t" in head:
        raise InputError(
            "this line is a table's row, and the first is none",
            file=source.path,
            line=next(at for at, one in enumerate(head.split("\n"), 1) if "\t" in one),
            hint=_REPORT_HINT,
        )
    else:
        cells, at, header_lines, column = [""], 0, line - 1, "1"
    header = "" if column != str(at + 1) else ", no header line"
    if len(cells) > 1:
        name = f"{_DELIMITERS[delimiter]}{_packed(source)}{header}"
        return Layout("table", name, column, encoding, delimiter, quoted, at, len(cells), header_lines)
    name = f"a query a line{_packed(source)}{header}"
    # Only where quotes are written can a line end or a quotation mark stand for itself.
    if ".csv" in source.path.suffixes or any(one.startswith('"') for one in head.splitlines()):
        return Layout("table", name, column, encoding, "\x1f", True, 0, 1, header_lines)
    return Layout("lines", name, column, encoding, header_lines=header_lines)


def table_reader(lines: Iterable[str], delimiter: str, quoted: bool, strict: bool = False) -> _Reader:
    """A `csv.reader` of these rules; where not `quoted`, a quotation mark is a character like others."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    return csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=strict)


def _first_rows(head: str) -> list[_Row]:
    """The first row as each delimiter would have it; first tabs, then what makes the most cells."""
    rows: list[_Row] = []
    for delimiter in _DELIMITERS:
        quoted = delimiter != "\t" or (head.lstrip().startswith('"') and _quotes_fit(head))
        reader = table_reader(io.StringIO(head, newline=""), delimiter, quoted)
        line = 1
        try:
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    rows.append((delimiter, quoted, line, cells))
                    break
                line = reader.line_num + 1
        except csv.Error:
            continue
    rows.sort(key=lambda row: (-len(row[3]), row[0] != "\t"))
    rows.sort(key=lambda row: not (row[0] == "\t" and len(row[3]) > 1))
    return rows or [("\t", False, 1, [""])]


def _quotes_fit(head: str) -> bool:
    """Whether quotation marks enclose a TSV's cells, and are not characters of the queries."""
    try:
        for _ in table_reader(io.StringIO(head, newline=""), "\t", quoted=True, strict=True):
            pass
    except csv.Error:
        return False
    return True


def _named_or_numbered(
    source: Source, rows: list[_Row], query_column: str | None
) -> tuple[_Row, int, bool] | None:
    """The row whose cells tell the query's column, its index, and whether the row is a header line."""
    problem: InputError | None = None
    for row in rows:
        cells = row[3]
        try:
            at = _find(cells, query_column, source.path)
        except InputError as reason:
            problem = problem or reason
            continue
        if at is not None:
            by_position = query_column is not None and query_column.isdecimal() and cells[at] != query_column
            names = {_canonical(cell) for cell in cells}
            return row, at, not by_position or bool(names & {*QUERY_NAMES, *_OTHER_NAMES})
    if problem is not None:
        raise problem
    return None


def _packed(source: Source) -> str:
    return f", {source.packing}" if source.packing else ""
