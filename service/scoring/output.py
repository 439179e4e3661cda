"""The results of all parts as one file, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from pydantic import BaseModel

from bidmatch.base.errors import ConfigError

OutputKind = Literal["parquet", "csv", "tsv", "jsonl"]
Write = Callable[[pa.Table], None]

_KINDS: dict[str, OutputKind] = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
_ROW_GROUP_ROWS = 1 << 17
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS_PER_UNIT = 1000


def output_kind(path: Path) -> OutputKind:
    """The format that a file name asks for.

    Raises:
        ConfigError: none that can be written.
    """
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"{path}: what format is that to be?", hint=f"The name must end with one of {', '.join(_KINDS)}."
        )
    return kind


class Tally:
    """What the matches come to, in memory that does not grow with them."""

    def __init__(self) -> None:
        self.matches = 0
        self.matched = 0
        self.matched_rows = 0
        self.exact = 0
        bins = 4 * _BINS_PER_UNIT + 1
        self._all, self._first = np.zeros(bins, np.int64), np.zeros(bins, np.int64)

    def add(self, table: pa.Table) -> None:
        """Count a table of `result_schema`."""
        first = pc.equal(table["rank"], 1).to_numpy()
        self.matches += len(table)
        self.matched += int(first.sum())
        self.matched_rows += int(table["count"].to_numpy()[first].sum())
        self.exact += int(pc.sum(pc.equal(table["source"].cast(pa.string()), "exact")).as_py() or 0)
        places = np.rint((table["score"].to_numpy().astype(np.float64) + 2.0) * _BINS_PER_UNIT)
        places = np.clip(places, 0, len(self._all) - 1).astype(np.int64)
        self._all += np.bincount(places, minlength=len(self._all))
        self._first += np.bincount(places[first], minlength=len(self._all))

    def quantiles(self, first_only: bool = False) -> dict[str, float]:
        """Quantiles of the score, to three decimals: of all matches, or of each query's first."""
        counts = self._first if first_only else self._all
        total = int(counts.sum())
        if total == 0:
            return {}
        places = np.searchsorted(np.cumsum(counts), [np.ceil(q * total) for q in _QUANTILES])
        return {
            f"p{round(q * 100)}": round(int(place) / _BINS_PER_UNIT - 2.0, 3)
            for q, place in zip(_QUANTILES, places, strict=True)
        }


class Summary(BaseModel):
    """What a run did.

    Attributes:
        output: the file.
        bundle_id: version of the bundle.
        rows: queries of the log.
        distinct: distinct ones, after normalising, empty ones not counted.
        empty: rows that normalise to nothing; they have no matches.
        skipped: bad lines left out.
        matches: rows written.
        exact: matches whose phrase equals the query.
        matched: distinct queries with a match.
        unmatched: distinct queries without one; the output has no row for them.
        coverage: percent of distinct queries with a match.
        traffic_coverage: percent of the log's rows, empty ones included, with a match.
        matches_per_query: over distinct queries.
        score_quantiles: of all matches.
        first_score_quantiles: of each query's first match.
        scored: queries scored by this run; the others were scored before it was resumed.
        seconds: of this run.
        scoring_seconds: of scoring alone.
        queries_per_second: `scored` by `scoring_seconds`.
    """

    output: str
    bundle_id: str
    rows: int
    distinct: int
    empty: int
    skipped: int
    matches: int
    exact: int
    matched: int
    unmatched: int
    coverage: float
    traffic_coverage: float
    matches_per_query: float
    score_quantiles: dict[str, float]
    first_score_quantiles: dict[str, float]
    scored: int
    seconds: float
    scoring_seconds: float
    queries_per_second: float


def write_output(
    parts: Iterator[Path], path: Path, kind: OutputKind, schema: pa.Schema, about: dict[str, str]
) -> Tally:
    """Write the parts' tables, one after the other.

    Args:
        parts: Arrow files of `schema`.
        path: file to write.
        kind: its format.
        schema: see `result_schema`.
        about: kept in Parquet's metadata.
    """
    tally = Tally()
    with _WRITERS[kind](path, schema, about) as write:
        for part in parts:
            with pa.ipc.open_file(str(part)) as stream:
                table = stream.read_all()
            tally.add(table)
            write(table)
    return tally


@contextmanager
def _parquet(path: Path, schema: pa.Schema, about: dict[str, str]) -> Iterator[Write]:
    schema = schema.with_metadata({f"bidmatch.{name}": value for name, value in about.items()})
    waiting: list[pa.Table] = []
    rows = 0

    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            nonlocal rows
            if waiting:
                writer.write_table(pa.concat_tables(waiting).cast(schema))
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
def _delimited(path: Path, schema: pa.Schema, delimiter: str) -> Iterator[Write]:
    plain = schema.set(schema.get_field_index("source"), pa.field("source", pa.string()))
    options = pcsv.WriteOptions(delimiter=delimiter, quoting_style="needed")
    with pcsv.CSVWriter(path, plain, write_options=options) as writer:
        yield lambda table: writer.write_table(table.cast(plain))


@contextmanager
def _csv(path: Path, schema: pa.Schema, about: dict[str, str]) -> Iterator[Write]:  # noqa: ARG001
    with _delimited(path, schema, ",") as write:
        yield write


@contextmanager
def _tsv(path: Path, schema: pa.Schema, about: dict[str, str]) -> Iterator[Write]:  # noqa: ARG001
    with _delimited(path, schema, "\t") as write:
        yield write


@contextmanager
def _jsonl(path: Path, schema: pa.Schema, about: dict[str, str]) -> Iterator[Write]:  # noqa: ARG001
    with path.open("wb") as stream:
        yield lambda table: _write_objects(stream, table)


def _write_objects(stream: BinaryIO, table: pa.Table) -> None:
    # numpy.float32 is written with the fewest digits that give the same float32; Python's float is not.
    columns = [
        list(column.to_numpy()) if pa.types.is_float32(column.type) else column.to_pylist()
        for column in table.itercolumns()
    ]
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    names = table.column_names
    for row in zip(*columns, strict=True):
        stream.write(orjson.dumps(dict(zip(names, row, strict=True)), option=options))


_WRITERS = {"parquet": _parquet, "csv": _csv, "tsv": _tsv, "jsonl": _jsonl}
