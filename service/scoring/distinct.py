"""The distinct queries of a log in the order of their first appearance, found in bounded memory.

Two passes over scratch files. First the rows are scattered by the hash of their key, so that each file can be
reduced to its distinct keys alone. These are scattered again by where they first appeared, so that each file
can be sorted alone, and one after the other gives the order of the log.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from bidmatch.base.files import atomic_file
from bidmatch.base.strings import hash64, key_array

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
# Scratch batches are small: threads would take longer to begin than to compress.
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READ = pa.ipc.IpcReadOptions(use_threads=False)
_BITS = 6
BUCKETS = 1 << _BITS
_DEEPEST = 4  # 30 of a hash's 32 bits
_MOST_BYTES = 1 << 20


class LogCounts(BaseModel):
    """What was read.

    Attributes:
        read: rows of the log.
        rows: those of the shard, empty ones included; without shards, all.
        empty: those that normalise to nothing.
        distinct: distinct keys of the others.
        skipped: bad lines that were left out.
        first_skipped: where and why the first was.
        left_out: rows of ads reports that hold no query, by reason.
        bytes: size of the log's files.
        seconds: that reading took.
    """

    read: int = 0
    rows: int = 0
    empty: int = 0
    distinct: int = 0
    skipped: int = 0
    first_skipped: str = ""
    left_out: dict[str, int] = {}
    bytes: int = 0
    seconds: float = 0.0


class Shard(BaseModel):
    """One of several parts that a log's distinct queries are divided into by the hash of their keys.

    Attributes:
        number: which, from 1.
        of: how many there are.
    """

    model_config = ConfigDict(frozen=True)

    number: int = Field(ge=1)
    of: int = Field(ge=1)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def holds(self, keys: pa.Array) -> np.ndarray:
        """Whether each key is one of this shard's: bool (n,). The empty key is some shard's, too."""
        # The low half of the hash chooses scratch files.
        return (hash64(keys) >> np.uint64(32)) % np.uint64(self.of) == np.uint64(self.number - 1)


def write_distinct(
    chunks: Iterable[pa.Array],
    counts: LogCounts,
    out: Path,
    scratch: Path,
    *,
    shard: Shard | None = None,
    ordered: bool = True,
) -> None:
    """Write the distinct queries to `out`, an Arrow file of one batch for each part to be scored.

    Args:
        chunks: the log, large_string, some queries at a time.
        counts: completed here with read, rows, empty and distinct.
        out: appears when whole. Columns `query` (the first spelling of each key) and `count`.
        scratch: a folder for scratch files, made and removed here; what it held is removed first.
        shard: whose queries are written; None: all.
        ordered: by first appearance; else by hash, which takes no second scattering.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    by_key = scattered(_reduced_chunks(chunks, counts, shard), key_bucket, scratch / "by_key")
    tables: Iterable[pa.Table] = map(_reduced, by_key)
    if ordered:
        tables = scattered(
            _grouped(tables), lambda table, depth: _place_bucket(table, depth, counts), scratch / "by_place"
        )
    with atomic_file(out) as partial:
        counts.distinct = _write_parts(tables, partial)
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
    sizes, counts = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.int64)
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
                counts[number] += len(rows)
    for number in np.flatnonzero(sizes).tolist():
        path = _stream(folder, number)
        with pa.ipc.open_stream(str(path), options=_READ) as stream:
            if sizes[number] <= _MOST_BYTES or counts[number] == 1 or depth == _DEEPEST:
                yield stream.read_all()
            else:
                batches = (pa.Table.from_batches([batch]) for batch in stream)
                yield from scattered(_grouped(batches), bucket, folder / str(number), depth + 1)
        path.unlink()


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables large enough to be worth dividing: a few rows at a time would cost a write for each bucket."""
    group: list[pa.Table] = []
    size = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        if size >= _MOST_BYTES:
            yield pa.concat_tables(group).combine_chunks()
            group, size = [], 0
    if group:
        yield pa.concat_tables(group).combine_chunks()


def _stream(folder: Path, number: int) -> Path:
    return folder / f"{number}.arrows"


def key_bucket(table: pa.Table, depth: int) -> np.ndarray:
    """For `scattered`: by the hash of the column `key`, so that rows of one key stay together."""
    hashes = hash64(table["key"].combine_chunks())
    return ((hashes >> np.uint64(_BITS * depth)) % np.uint64(BUCKETS)).astype(np.int64)


def _place_bucket(table: pa.Table, depth: int, counts: LogCounts) -> np.ndarray:
    shift = max(0, counts.read.bit_length() - _BITS * (depth + 1))
    return (table["position"].to_numpy() >> shift) % BUCKETS


def _reduced_chunks(chunks: Iterable[pa.Array], counts: LogCounts, shard: Shard | None) -> Iterator[pa.Table]:
    for chunk in chunks:
        seen = chunk.dictionary_encode()
        keys = key_array(seen.dictionary)
        table = pa.table(
            {
                "key": keys.take(seen.indices),
                "query": chunk,
                "position": np.arange(counts.read, counts.read + len(chunk)),
                "count": np.ones(len(chunk), np.int64),
            }
        )
        counts.read += len(chunk)
        if shard is not None:
            table = table.filter(pa.array(shard.holds(keys)[seen.indices.to_numpy()]))
        asked = table.filter(pc.not_equal(table["key"], ""))
        counts.rows += len(table)
        counts.empty += len(table) - len(asked)
        if len(asked):
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
    rows = held = 0
    waiting: list[pa.Table] = []
    with pa.ipc.new_file(str(path), _QUERY_SCHEMA, options=_LZ4) as writer:
        for table in tables:
            ordered = table.select(["query", "count"]).take(pc.sort_indices(table["position"]))
            waiting.append(ordered)
            rows += len(ordered)
            held += len(ordered)
            # Long queries come a few at a time, and what waits is not to be copied for each.
            if held >= PART_QUERIES:
                gathered = pa.concat_tables(waiting).combine_chunks()
                whole = len(gathered) // PART_QUERIES * PART_QUERIES
                writer.write_table(gathered.slice(0, whole), max_chunksize=PART_QUERIES)
                # A copy, for a slice would keep all of the table alive.
                waiting = [gathered.take(np.arange(whole, len(gathered)))]
                held -= whole
        rest = pa.concat_tables([_QUERY_SCHEMA.empty_table(), *waiting]).combine_chunks()
        writer.write_table(rest, max_chunksize=PART_QUERIES)
    return rows
