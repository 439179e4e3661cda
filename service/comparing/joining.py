"""The matches of files brought to the queries of a log, in bounded memory.

Two passes over scratch files: matches and queries are scattered together by the hash of their key, so that
each file can be joined alone; what is found is scattered again by the query's place in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.strings import key_array
from service.comparing.answers import one_chunk
from service.scoring.distinct import BUCKETS, PART_QUERIES, key_bucket, scattered

# A query of the log has its place there, a match has -1.
ROWS = pa.schema(
    [
        ("key", pa.large_string()),
        ("place", pa.int64()),
        ("rank", pa.int64()),
        ("order", pa.int64()),
        ("phrase", pa.large_string()),
        ("id", pa.large_string()),
    ]
)
FOUND = pa.schema([("place", pa.int64()), ("name", pa.large_string()), ("phrase", pa.large_string())])

_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")
_PLACE_BITS = BUCKETS.bit_length() - 1


def match_rows(matches: pa.Table, before: int) -> pa.Table:
    """Matches as `ROWS`.

    Args:
        matches: of `match_rows.SCHEMA`.
        before: rows of the same side before these.
    """
    order = np.arange(before, before + len(matches))
    keys = key_array(one_chunk(matches["query"]))
    return pa.table(
        [keys, np.full(len(matches), -1), matches["rank"], order, matches["phrase"], matches["id"]], ROWS
    )


def join(
    matches: Callable[[], Iterator[pa.Table]], queries: Path, by_id: bool, k: int, out: Path, scratch: Path
) -> int:
    """Write the matches of the log's queries, each phrase once, the first k by rank; how many there are.

    Args:
        matches: gives them, tables of `ROWS`.
        queries: the Arrow file of the log's queries, a batch for each part.
        by_id: whether phrases are told apart by id, or by text.
        k: most matches for a query.
        out: an Arrow file of `FOUND`, by place and then by rank, a batch for each part.
        scratch: a folder for scratch files that are removed again.
    """
    with pa.OSFile(str(queries)) as file:
        log = pa.ipc.open_file(file)
        parts = log.num_record_batches
        bits = (parts * PART_QUERIES).bit_length()

        def rows() -> Iterator[pa.Table]:
            yield from matches()
            for part in range(parts):
                yield _query_rows(log.get_batch(part), part * PART_QUERIES)

        def by_place(table: pa.Table, depth: int) -> np.ndarray:
            shift = max(0, bits - _PLACE_BITS * (depth + 1))
            found: np.ndarray = (table["place"].to_numpy() >> shift) % BUCKETS
            return found

        joined = (_joined(table, by_id, k) for table in scattered(rows(), key_bucket, scratch / "by_key"))
        return _write_parts(scattered(joined, by_place, scratch / "by_place"), parts, out)


def _query_rows(batch: pa.RecordBatch, place: int) -> pa.Table:
    n = batch.num_rows
    nothing, zeros = pa.nulls(n, pa.large_string()), np.zeros(n, np.int64)
    keys = key_array(batch.column("query"))
    return pa.table([keys, np.arange(place, place + n), zeros, zeros, nothing, nothing], ROWS)


def _joined(table: pa.Table, by_id: bool, k: int) -> pa.Table:
    """The matches of the queries in a table of `ROWS` that has all rows of each of its keys: of `FOUND`."""
    keys = one_chunk(table["key"]).dictionary_encode()
    code, place = keys.indices.to_numpy(), table["place"].to_numpy()
    place_of_key = np.full(len(keys.dictionary), -1)
    place_of_key[code[place >= 0]] = place[place >= 0]
    rows = np.flatnonzero((place < 0) & (place_of_key[code] >= 0))
    place = place_of_key[code[rows]]
    order = np.lexsort((table["order"].to_numpy()[rows], table["rank"].to_numpy()[rows], place))
    rows, place = rows[order], place[order]
    matches = table.take(rows)
    names = one_chunk(matches["id"]) if by_id else key_array(one_chunk(matches["phrase"]))
    phrase = names.dictionary_encode()
    each_phrase = place * max(1, len(phrase.dictionary)) + phrase.indices.to_numpy()
    first = np.sort(np.unique(each_phrase, return_index=True)[1])
    rank = np.arange(len(first)) - np.searchsorted(place[first], place[first])
    kept = first[rank < k]
    shown = pc.coalesce(matches["phrase"], matches["id"])
    return pa.table([place[kept], names.take(kept), shown.take(kept)], FOUND)


def _write_parts(tables: Iterable[pa.Table], parts: int, path: Path) -> int:
    written, part = 0, 0
    rest = FOUND.empty_table()
    with pa.ipc.new_file(str(path), FOUND, options=_LZ4) as out:

        def write() -> None:
            nonlocal part, rest
            part += 1
            cut = int(np.searchsorted(rest["place"].to_numpy(), part * PART_QUERIES))
            batches = rest.slice(0, cut).combine_chunks().to_batches()
            out.write_batch(batches[0] if batches else pa.RecordBatch.from_pylist([], FOUND))
            # A copy, for a slice would keep all of the table alive.
            rest = rest.take(np.arange(cut, len(rest)))

        for table in tables:
            written += len(table)
            rest = pa.concat_tables([rest, table.take(np.argsort(table["place"].to_numpy(), kind="stable"))])
            while len(rest) and rest["place"][-1].as_py() >= (part + 1) * PART_QUERIES:
                write()
        while part < parts:
            write()
    return written
