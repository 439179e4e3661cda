"""Files of results: their formats, by the ends of names, and what writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from bidmatch.base.errors import ConfigError

Write = Callable[[pa.Table], None]

# Rows that wait for their group are memory.
_ROW_GROUP_ROWS = 1 << 15


@dataclass(frozen=True)
class OutputFormat:
    """How results are written.

    Attributes:
        kind: what the rows look like.
        packing: how the text is compressed; None: it is not.
    """

    kind: Literal["parquet", "csv", "tsv", "jsonl"]
    packing: Literal["gzip", "zstd"] | None = None


_FORMATS = {
    "parquet": OutputFormat("parquet"),
    "csv": OutputFormat("csv"),
    "csv.gz": OutputFormat("csv", "gzip"),
    "csv.zst": OutputFormat("csv", "zstd"),
    "tsv": OutputFormat("tsv"),
    "tsv.gz": OutputFormat("tsv", "gzip"),
    "tsv.zst": OutputFormat("tsv", "zstd"),
    "jsonl": OutputFormat("jsonl"),
    "jsonl.gz": OutputFormat("jsonl", "gzip"),
    "jsonl.zst": OutputFormat("jsonl", "zstd"),
    "ndjson": OutputFormat("jsonl"),
    "ndjson.gz": OutputFormat("jsonl", "gzip"),
    "ndjson.zst": OutputFormat("jsonl", "zstd"),
}


def name_end(path: Path) -> str | None:
    """The end of a file's name that says its format, such as `csv.gz`; None where none does."""
    name = path.name.lower()
    ends = [end for end in _FORMATS if name.endswith(f".{end}")]
    return max(ends, key=len, default=None)


def format_of(end: str) -> OutputFormat:
    """The format that names with this end have.

    Raises:
        ConfigError: none that can be written.
    """
    if end not in _FORMATS:
        raise ConfigError(
            f"there is no output format {end!r}", hint=f"The formats are {', '.join(_FORMATS)}."
        )
    return _FORMATS[end]


@contextmanager
def writer(path: Path, form: OutputFormat, schema: pa.Schema, about: dict[str, str]) -> Iterator[Write]:
    """Yields a function that appends tables of `schema` to a new file; `about` is kept in Parquet's metadata.

    The file's bytes depend on the tables and their cuts alone.
    """
    if form.kind == "parquet":
        with _parquet(path, schema, about) as write:
            yield write
        return
    with pa.OSFile(str(path), "wb") as raw:
        if form.packing is None:
            with _text(raw, form, schema) as write:
                yield write
        else:
            with pa.CompressedOutputStream(raw, form.packing) as packed, _text(packed, form, schema) as write:
                yield write


@contextmanager
def _parquet(path: Path, schema: pa.Schema, about: dict[str, str]) -> Iterator[Write]:
    schema = schema.with_metadata({f"bidmatch.{name}": value for name, value in about.items()})
    waiting: list[pa.Table] = []
    rows = 0

    with pq.ParquetWriter(path, schema, compression="zstd") as out:

        def flush() -> None:
            nonlocal rows
            if waiting:
                out.write_table(pa.concat_tables(waiting).cast(schema))
                waiting.clear()
                rows = 0

        def write(table: pa.Table) -> None:
            nonlocal rows
            waiting.append(table)
            rows += len(table)
            if rows >= _ROW_GROUP_ROWS:
                flush()

        yield write
        flush()


@contextmanager
def _text(stream: Any, form: OutputFormat, schema: pa.Schema) -> Iterator[Write]:
    if form.kind == "jsonl":
        yield lambda table: _write_objects(stream, table)
        return
    plain = pa.schema(
        [field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field for field in schema]
    )
    options = pcsv.WriteOptions(delimiter="," if form.kind == "csv" else "\t", quoting_style="needed")
    with pcsv.CSVWriter(stream, plain, write_options=options) as out:
        yield lambda table: out.write_table(table.cast(plain))


def _write_objects(stream: Any, table: pa.Table) -> None:
    # numpy.float32 is written with the fewest digits that give the same float32; Python's float is not.
    columns = [
        list(column.to_numpy()) if pa.types.is_float32(column.type) else column.to_pylist()
        for column in table.itercolumns()
    ]
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    names = table.column_names
    lines = (
        orjson.dumps(dict(zip(names, row, strict=True)), option=options) for row in zip(*columns, strict=True)
    )
    stream.write(b"".join(lines))
