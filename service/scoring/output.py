"""The results of all parts as one file or as a folder of files, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field

from bidmatch.base.files import atomic_file
from service.scoring.writers import format_of, writer

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS_PER_UNIT = 1000


class Tally:
    """What the matches come to, in memory that does not grow with them."""

    def __init__(self) -> None:
        self.matches = 0
        self.matched = 0
        self.matched_rows = 0
        self.exact = 0
        bins = 4 * _BINS_PER_UNIT + 1
        self._all, self._first = np.zeros(bins, np.int64), np.zeros(bins, np.int64)

    def state(self) -> dict[str, Any]:
        """All of it as JSON values, for `of`."""
        kept = {name: getattr(self, name) for name in ("matches", "matched", "matched_rows", "exact")}
        return kept | {"all": self._all.tolist(), "first": self._first.tolist()}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Tally:
        """The tally that has this state; of an empty one, nothing is counted yet."""
        tally = cls()
        if state:
            for name in ("matches", "matched", "matched_rows", "exact"):
                setattr(tally, name, state[name])
            tally._all, tally._first = (np.array(state[name], np.int64) for name in ("all", "first"))
        return tally

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
        output: the file, or the folder.
        files: how many were written.
        shard: which of how many, where the run scored one alone; all that follows is of this shard, but for
            `skipped`, `left_out` and what was read.
        bundle_id: version of the bundle.
        rows: queries of the log.
        distinct: distinct ones, after normalising, empty ones not counted.
        empty: rows that normalise to nothing; they have no matches.
        skipped: bad lines left out.
        left_out: rows of ads reports that hold no query, such as totals.
        read_rows: rows of the whole log.
        read_bytes: bytes of its files, as they are stored.
        read_seconds: of reading it and finding its distinct queries.
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
        scoring_seconds: of scoring and writing.
        queries_per_second: `scored` by `scoring_seconds`.
    """

    output: str
    files: int
    shard: str | None
    bundle_id: str
    rows: int
    distinct: int
    empty: int
    skipped: int
    left_out: int
    read_rows: int
    read_bytes: int
    read_seconds: float
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


class Written(BaseModel):
    """How far a folder's files are written: all before this row of the results are in whole files.

    Attributes:
        files: whole files.
        part: the part that goes on in the next file.
        row: its first row there.
        tally: `Tally.state` of the rows in whole files.
    """

    files: int = 0
    part: int = 0
    row: int = 0
    tally: dict[str, Any] = Field(default_factory=dict)


def write_file(
    tables: Iterable[pa.Table], path: Path, end: str, schema: pa.Schema, about: dict[str, str]
) -> Tally:
    """Write tables into one file, one after the other.

    Args:
        tables: of `schema`.
        path: file to write.
        end: format, see `format_of`.
        schema: see `result_schema`.
        about: kept in Parquet's metadata.
    """
    tally = Tally()
    with writer(path, format_of(end), schema, about) as write:
        for table in tables:
            tally.add(table)
            write(table)
    return tally


def write_folder(
    tables: Iterable[pa.Table],
    first: Written,
    folder: Path,
    end: str,
    schema: pa.Schema,
    about: dict[str, str],
    rows_per_file: int,
    keep: Callable[[Written], None],
) -> Written:
    """Write tables into files `part-00000.END`, `part-00001.END` and so on, each of which appears whole.

    Args:
        tables: the results of each part from `first.part` on, of `schema`.
        first: where a former run stopped; its files are not written again.
        folder: where the files are.
        end: of their names, which says the format.
        schema: see `result_schema`.
        about: kept in Parquet's metadata.
        rows_per_file: rows of each file but the last.
        keep: told after each file.
    """
    written, tally = first, Tally.of(first.tally)
    pieces = _pieces(tables, first, rows_per_file)
    piece = next(pieces, None)
    part, row = first.part, first.row
    # A log without matches still gets a file, which has the columns.
    while piece is not None or written.files == 0:
        path = folder / f"part-{written.files:05}.{end}"
        with atomic_file(path) as partial, writer(partial, format_of(end), schema, about) as write:
            rows = 0
            while piece is not None and rows < rows_per_file:
                table, part, row = piece
                write(table)
                tally.add(table)
                rows += len(table)
                piece = next(pieces, None)
        written = Written(files=written.files + 1, part=part, row=row, tally=tally.state())
        keep(written)
    return written


def _pieces(
    tables: Iterable[pa.Table], first: Written, rows_per_file: int
) -> Iterator[tuple[pa.Table, int, int]]:
    """The tables cut where files end: rows, number of their part, and where in it the next piece begins."""
    given = 0
    for part, table in enumerate(tables, first.part):
        at = first.row if part == first.part else 0
        while at < len(table):
            piece = table.slice(at, rows_per_file - given % rows_per_file)
            at += len(piece)
            given += len(piece)
            yield piece, part, at
