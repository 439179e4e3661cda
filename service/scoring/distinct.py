"""The distinct queries of a log in the order of their first appearance, found in bounded memory.

Two passes over scratch files. First the rows are scattered by the hash of their key, so that each file can be
reduced to its distinct keys alone. These are scattered again by where they first appeared, so that each file
can be sorted alone, and one after the other gives the order of the log.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
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
_BITS = 6
BUCKETS = 1 << _BITS
_DEEPEST = 4  # 30 of a hash's 32 bits
_MOST_BYTES = 1 << 23


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


def write_distinct(chunks: Iterable[list[str]], counts: LogCounts, out: Path, scratch: Path) -> None:
    """Write the distinct queries to `out`, an Arrow file of one batch for each part to be scored.

    Args:
        chunks: the log, some queries at a time.
        counts: completed here with rows, empty and distinct.
        out: appears when whole. Columns `query` (the first spelling of each key) and `count`.
        scratch: a folder for scratch files, made and removed here; what it held is removed first.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    by_key = scattered(_reduced_chunks(chunks, counts), _key_bucket, scratch / "by_key")
    distinct = map(_reduced, by_key)
    by_place = scattered(
        distinct, lambda table, depth: _place_bucket(table, depth, counts), scratch / "by_place"
    )
    with atomic_file(out) as partial:
        counts.distinct = _write_parts(by_place, partial)
    shutil.rmtree(scratch, ignore_errors=True)


def scattered(
    tables: Iterable[pa.Table], bucket: Callable[[pa.Table, int], np.ndarray], folder: Path, depth: int = 0
) -> Iterator[pa.Table]:
    """The rows of all tables, bucket after bucket, in tables that each fit memory.

    Args:
        tables: any number of tables of one schema.
        bucket: a table and a depth to the bucket of each row, int64 below BUCKETS. A bucket that is too large
            is divided again, one deeper.
        folder: made here, for scratch files; they go as they are read.
        depth: of these tables' buckets.
    """
    folder.mkdir()
    sizes = np.zeros(BUCKETS, np.int64)
    with ExitStack() as stack:
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        for table in tables:
            numbers = bucket(table, depth)
            order = np.argsort(numbers, kind="stable")
            ordered = table.take(order)
            ends = np.cumsum(np.bincount(numbers, minlength=BUCKETS))
            for number in np.unique(numbers).tolist():
                rows = ordered[int(ends[number - 1]) if number else 0 : int(ends[number])]
                if number not in writers:
                    stream = pa.ipc.new_stream(str(_stream(folder, number)), rows.schema, options=_LZ4)
                    writers[number] = stack.enter_context(stream)
                writers[number].write_table(rows)
                sizes[number] += rows.nbytes
    for number in np.flatnonzero(sizes).tolist():
        path = _stream(folder, number)
        with pa.ipc.open_stream(str(path)) as stream:
            if sizes[number] <= _MOST_BYTES or depth == _DEEPEST:
                yield stream.read_all()
            else:
                parts = (pa.Table.from_batches([batch]) for batch in stream)
                yield from scattered(parts, bucket, folder / str(number), depth + 1)
        path.unlink()


def _stream(folder: Path, number: int) -> Path:
    return folder / f"{number}.arrows"


def _key_bucket(table: pa.Table, depth: int) -> np.ndarray:
    hashes = (zlib.crc32(key.encode()) for key in table["key"].to_pylist())
    return (np.fromiter(hashes, np.int64, len(table)) >> (_BITS * depth)) % BUCKETS


def _place_bucket(table: pa.Table, depth: int, counts: LogCounts) -> np.ndarray:
    shift = max(0, counts.rows.bit_length() - _BITS * (depth + 1))
    return (table["position"].to_numpy() >> shift) % BUCKETS


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
            rest = rest.take(np.arange(whole, len(rest)))
            rows += len(ordered)
        writer.write_table(rest, max_chunksize=PART_QUERIES)
    return rows
