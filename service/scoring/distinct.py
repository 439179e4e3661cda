"""The distinct queries of a log in the order of their first appearance, found in bounded memory.

Two passes over files on disk. First the rows are spread over files by the hash of their key, so that each
file can be reduced to its distinct keys alone. These are spread again by where they first appeared, so that
each of those files can be sorted alone, and one after the other gives the order of the log.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from bidmatch.base import text
from bidmatch.base.files import atomic_file

PART_QUERIES = 4096

_SPILL_SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("query", pa.large_string()),
        ("position", pa.int64()),
        ("count", pa.int64()),
    ]
)
_QUERY_SCHEMA = pa.schema([("query", pa.large_string()), ("count", pa.int64())])
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")
# Together these bound memory for logs of up to 8 GiB; beyond, it grows by their 1/512th part.
_FILE_BYTES = 1 << 24
_RANGE_ROWS = 1 << 18
_MOST_FILES = 512


class LogCounts(BaseModel):
    """What was read.

    Attributes:
        rows: queries of the log, empty ones included.
        empty: those that normalise to nothing.
        distinct: distinct keys of the others.
        skipped: bad lines that were left out.
        first_skipped: where and why the first was.
    """

    rows: int = 0
    empty: int = 0
    distinct: int = 0
    skipped: int = 0
    first_skipped: str = ""


@dataclass(frozen=True)
class Spill:
    """Arrow streams on disk that tables are spread over."""

    folder: Path
    count: int

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)

    def write(self, tables: Iterable[tuple[pa.Table, np.ndarray]]) -> None:
        """Append each table's rows to the streams that its int64 array names, a number a row."""
        with ExitStack() as stack:
            writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
            for table, numbers in tables:
                if not len(table):
                    continue
                order = np.argsort(numbers, kind="stable")
                spread = table.take(pa.array(order))
                present, starts = np.unique(numbers[order], return_index=True)
                for number, start, end in zip(present, starts, [*starts[1:], len(order)], strict=True):
                    if number not in writers:
                        path = str(self._path(int(number)))
                        writer = pa.ipc.new_stream(path, _SPILL_SCHEMA, options=_LZ4)
                        writers[number] = stack.enter_context(writer)
                    writers[number].write_table(spread.slice(start, end - start))

    def read(self) -> Iterator[pa.Table]:
        """The table of each stream that was written to, deleted as the next is asked for."""
        for number in range(self.count):
            path = self._path(number)
            if path.exists():
                with pa.ipc.open_stream(str(path)) as stream:
                    table = stream.read_all()
                yield table
                path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.arrows"


def write_distinct(
    chunks: Iterable[list[str]], counts: LogCounts, size: int, out: Path, scratch: Path
) -> None:
    """Write the distinct queries to `out`, an Arrow file of one batch for each part to be scored.

    Args:
        chunks: the log, some queries at a time.
        counts: completed here with rows, empty and distinct.
        size: about how many bytes the log has, which decides the number of scratch files.
        out: appears when whole. Columns `query` (the first spelling of each key) and `count`.
        scratch: a folder for scratch files, made and removed here; what it held is removed first.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    files = max(1, min(_MOST_FILES, size // _FILE_BYTES + 1))
    by_key = Spill(scratch / "by_key", files)
    by_key.write((table, _hashes(table["key"], files)) for table in _reduced_chunks(chunks, counts))
    rows = max(_RANGE_ROWS, counts.rows // _MOST_FILES + 1)
    by_place = Spill(scratch / "by_place", counts.rows // rows + 1)
    by_place.write((table, table["position"].to_numpy() // rows) for table in map(_reduced, by_key.read()))
    with atomic_file(out) as partial:
        counts.distinct = _write_parts(by_place.read(), partial)
    shutil.rmtree(scratch, ignore_errors=True)


def _reduced_chunks(chunks: Iterable[list[str]], counts: LogCounts) -> Iterator[pa.Table]:
    for chunk in chunks:
        if not chunk:
            continue
        queries = pa.array(chunk, pa.large_string())
        seen = queries.dictionary_encode()
        keys = pa.array([text.key(query) for query in seen.dictionary.to_pylist()], pa.large_string())
        table = pa.table(
            {
                "key": keys.take(seen.indices),
                "query": queries,
                "position": np.arange(counts.rows, counts.rows + len(chunk)),
                "count": np.ones(len(chunk), np.int64),
            }
        )
        asked = table.filter(pc.not_equal(table["key"], ""))
        counts.rows += len(chunk)
        counts.empty += len(table) - len(asked)
        yield _reduced(asked)


def _reduced(table: pa.Table) -> pa.Table:
    """One row a key: its first query and position, and how often it was there. Rows come in log order."""
    # Ordered aggregates such as "first" need one thread.
    grouped = table.group_by("key", use_threads=False).aggregate(
        [("query", "first"), ("position", "first"), ("count", "sum")]
    )
    return grouped.rename_columns(["key", "query", "position", "count"]).cast(_SPILL_SCHEMA)


def _hashes(keys: pa.ChunkedArray, buckets: int) -> np.ndarray:
    """A bucket for each key, int64."""
    if buckets == 1:
        return np.zeros(len(keys), np.int64)
    hashes = (zlib.crc32(key.encode()) for key in keys.to_pylist())
    return np.fromiter(hashes, np.int64, len(keys)) % buckets


def _write_parts(tables: Iterable[pa.Table], path: Path) -> int:
    """Sort each table by position, write all of them in batches of PART_QUERIES, return the rows."""
    rows = 0
    rest = _QUERY_SCHEMA.empty_table()
    with pa.ipc.new_file(str(path), _QUERY_SCHEMA, options=_LZ4) as writer:
        for table in tables:
            ordered = table.select(["query", "count"]).take(pc.sort_indices(table["position"]))
            rest = pa.concat_tables([rest, ordered]).combine_chunks()
            whole = len(rest) // PART_QUERIES * PART_QUERIES
            writer.write_table(rest.slice(0, whole), max_chunksize=PART_QUERIES)
            # A copy, for a slice would keep all of the table alive.
            rest = rest.slice(whole).take(pa.array(range(len(rest) - whole)))
            rows += len(ordered)
        writer.write_table(rest, max_chunksize=PART_QUERIES)
    return rows
