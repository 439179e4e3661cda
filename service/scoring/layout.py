"""Where the queries stand in a query log: format and column, recognised by content."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import HEAD_BYTES, Source, decode_head, detect_encoding
from bidmatch.base.reports import canonical
from service.scoring.reports import (
    Table,
    find_table,
    foreign_search_term,
    is_report,
    names_query,
    reads_like_a_header,
)

QUERY_NAMES = (
    "query",
    "searchquery",
    "searchterm",
    "userquery",
    "customersearchterm",
    "q",
    "querytext",
    "search",
    "searchterms",
)
_OTHER_NAMES = ("phrase", "keyword", "clicks", "impressions", "weight", "count", "date", "timestamp", "id")
DELIMITERS = {"\t": "TSV", ",": "CSV", ";": "CSV with semicolons", "|": "CSV with bars"}
_REPORT_HINT = "Of an ads platform, the search terms report is read; others hold no queries."

if TYPE_CHECKING:
    from _csv import Reader as _Reader

Kind = Literal["parquet", "objects", "strings", "table", "lines"]
_LOOK_AT_RECORDS = 300
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
        headers: header cells of a table that has other rows than data, such as totals: an ads platform's.
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
    headers: tuple[str, ...] = ()


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
        return Layout("strings", f"JSONL strings{packed(source)}", "value", codec)
    return _table_or_lines(source, head, query_column, codec)


def _find(headers: Sequence[str], wanted: str | None, file: Path) -> int | None:
    """Index of the query's column, None where no name tells it."""
    keys = [canonical(header) for header in headers]
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
    found = found or [at for at, key in enumerate(keys) if key and key == canonical(wanted)]
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
    foreign = foreign_search_term(headers)
    if foreign is not None:
        return InputError(
            f"looks like a search terms report whose column names are not English ({shown})",
            file=source.path,
            line=line,
            hint=f'Name the column of the search terms: --query-column "{foreign}".',
        )
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
        if len(source.head) >= HEAD_BYTES and "\n" not in source.head.decode(encoding, "replace"):
            raise InputError(
                f"the first line has more than {HEAD_BYTES:,} bytes, so that its fields cannot be told",
                file=source.path,
                line=1,
                hint="Put a shorter line first.",
            ) from None
        raise InputError(
            f"starts like JSON lines, but its first line is not valid JSON ({problem.msg})",
            file=source.path,
            hint="JSONL has one whole JSON value on each line.",
        ) from None
    at = _find(list(value), query_column, source.path)
    if at is None:
        raise _no_query_column(source, list(value))
    return Layout("objects", f"JSONL{packed(source)}", list(value)[at], encoding)


def _all_json_strings(head: str) -> bool:
    try:
        return all(isinstance(orjson.loads(line), str) for line in head.split("\n") if line.strip())
    except orjson.JSONDecodeError:
        return False


def _table_or_lines(source: Source, head: str, query_column: str | None, encoding: str) -> Layout:
    start = _table_start(head, query_column)
    if start is not None and (start[1].titles or is_report(start[1])):
        return _report(source, head, *start, query_column, encoding)
    rows = _first_rows(head)
    found = _named_or_numbered(source, rows, query_column)
    delimiter, quoted, line, cells = rows[0]
    if found is not None:
        (delimiter, quoted, line, cells), at, headed = found
        header_lines = line + sum(cell.count("\n") for cell in cells) if headed else line - 1
        column = cells[at].strip() if headed else str(at + 1)
    elif start is not None and (delimiter != "\t" or reads_like_a_header(start[1].cells)):
        raise _no_query_column(source, start[1].cells, start[1].line)
    elif delimiter == "\t" and _names_others(cells):
        raise _no_query_column(source, cells, line)
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
        name = f"{DELIMITERS[delimiter]}{packed(source)}{header}"
        return Layout("table", name, column, encoding, delimiter, quoted, at, len(cells), header_lines)
    name = f"a query a line{packed(source)}{header}"
    # Only where quotes are written can a line end or a quotation mark stand for itself.
    if ".csv" in source.path.suffixes or any(one.startswith('"') for one in head.splitlines()):
        return Layout("table", name, column, encoding, "\x1f", True, 0, 1, header_lines)
    return Layout("lines", name, column, encoding, header_lines=header_lines)


def _names_others(cells: list[str]) -> bool:
    """Whether a first row without a query's name is a header line all the same: `keyword`, `clicks`."""
    names = {canonical(cell) for cell in cells[1:]}
    return bool(names & {*_OTHER_NAMES}) and not any(name.isdecimal() for name in names)


def _table_start(head: str, query_column: str | None) -> tuple[str, Table] | None:
    """Delimiter and first row of the table that the file is or that stands in it."""
    by_name = query_column is not None and not query_column.strip().isdecimal()
    names = (canonical(query_column or ""),) if by_name else QUERY_NAMES
    found: list[tuple[str, Table]] = []
    for delimiter in DELIMITERS:
        records: list[tuple[int, list[str]]] = []
        reader = table_reader(io.StringIO(head, newline=""), delimiter, _quotes(head, delimiter))
        line = 1
        try:
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    records.append((line, cells))
                line = reader.line_num + 1
                if len(records) == _LOOK_AT_RECORDS:
                    break
        except csv.Error:
            continue
        table = find_table(records, names) or find_table(records, QUERY_NAMES)
        if table is not None:
            found.append((delimiter, table))
    return max(found, key=lambda one: (names_query(one[1].cells, names), len(one[1].cells)), default=None)


def _report(
    source: Source, head: str, delimiter: str, table: Table, query_column: str | None, encoding: str
) -> Layout:
    """The layout of a table below lines of text, or of an ads platform's report without such lines."""
    at = _find(table.cells, query_column, source.path)
    if at is None:
        raise _no_query_column(source, table.cells, table.line)
    name = f"{DELIMITERS[delimiter]}{packed(source)}"
    return Layout(
        "table",
        f"search terms report ({name})" if is_report(table) else f"{name} below {table.titles} other lines",
        table.cells[at].strip(),
        encoding,
        delimiter,
        _quotes(head, delimiter),
        at,
        len(table.cells),
        table.line + sum(cell.count("\n") for cell in table.cells),
        tuple(table.cells),
    )


def _quotes(head: str, delimiter: str) -> bool:
    """Whether `"` quotes the cells of a table with this delimiter."""
    return delimiter != "\t" or ('"' in head and quotes_fit(head))


def table_reader(lines: Iterable[str], delimiter: str, quoted: bool, strict: bool = False) -> _Reader:
    """A `csv.reader` of these rules; where not `quoted`, a quotation mark is a character like others."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    return csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=strict)


def _first_rows(head: str) -> list[_Row]:
    """The first row as each delimiter would have it; first tabs, then what makes the most cells."""
    rows: list[_Row] = []
    for delimiter in DELIMITERS:
        quoted = delimiter != "\t" or (head.lstrip().startswith('"') and quotes_fit(head))
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


def quotes_fit(head: str) -> bool:
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
            names = {canonical(cell) for cell in cells}
            return row, at, not by_position or bool(names & {*QUERY_NAMES, *_OTHER_NAMES})
    if problem is not None:
        raise problem
    return None


def packed(source: Source) -> str:
    """How a file is compressed, to be put behind its format."""
    return f", {source.packing}" if source.packing else ""
