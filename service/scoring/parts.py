"""Scores the distinct queries, part by part, on all cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from bidmatch.base.files import atomic_file
from service.engine import Engine, Matches
from service.options import MatchOptions

Result = TypeVar("Result")

BATCH_QUERIES = 64
_BATCH_CHARS = 1 << 17

SCHEMA = pa.schema(
    [
        ("query", pa.large_string()),
        ("count", pa.int64()),
        ("rank", pa.int32()),
        ("id", pa.large_string()),
        ("phrase", pa.large_string()),
        ("score", pa.float32()),
        ("encoder", pa.float32()),
        ("classifier", pa.float32()),
        ("relevance", pa.float32()),
        ("source", pa.dictionary(pa.int8(), pa.string())),
    ]
)


def result_schema(engine: Engine) -> pa.Schema:
    """SCHEMA and then the user's columns of the phrases; `phrase_` goes before a name that is taken."""
    taken = set(SCHEMA.names)
    users = [
        field.with_name(f"phrase_{field.name}" if field.name in taken else field.name)
        for field in engine.user_columns
    ]
    return pa.schema([*SCHEMA, *users])


_SOURCES = pa.array(["index", "exact"])


_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class Job:
    """What is to be scored.

    Attributes:
        queries: the Arrow file of all queries, a batch for each part.
        parts: numbers of the parts that are wanted.
        k: most matches for one query.
        min_score: see `Engine.match`.
        kept: where the results of a part are kept: read where they are there, else written, as
            `write_results` does; None: nowhere.
    """

    queries: Path
    parts: range
    k: int
    min_score: float | None
    kept: Callable[[int], Path] | None


ScoredParts = Generator[tuple[pa.Table, int], None, None]
# The results of part after part, as tables of `result_schema`, and how many queries each has.
#
# What a part holds and how it is cut into batches depends on the queries alone, never on who scores it or on
# what was done before: with 8-bit products a query's vector depends a little on its neighbours.
Scorer = Callable[[Engine, Job], ScoredParts]


def scored_parts(engine: Engine, job: Job, *, threads: int) -> ScoredParts:
    """A `Scorer` in this process.

    Args:
        engine: the bundle.
        job: what is to be scored.
        threads: parts worked on at once.
    """

    def score(number: int, batch: pa.RecordBatch) -> tuple[pa.Table, int]:
        kept = None if job.kept is None else job.kept(number)
        if kept is not None and kept.exists():
            return read_results(kept), batch.num_rows
        table = score_part(engine, batch, job.k, job.min_score)
        if kept is not None:
            with atomic_file(kept) as partial:
                write_results(str(partial), table)
        return table, batch.num_rows

    yield from each_part(job.queries, job.parts, threads, score)


def write_results(sink: Any, table: pa.Table) -> None:
    """Write the results of a part to a path or stream."""
    with pa.ipc.new_file(sink, table.schema, options=_LZ4) as out:
        out.write_table(table)


def read_results(path: Path) -> pa.Table:
    """What `write_results` wrote."""
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def each_part(
    queries: Path, parts: range | None, threads: int, work: Callable[[int, pa.RecordBatch], Result]
) -> Generator[Result, None, None]:
    """What `work` makes of part after part, in their order, on several threads.

    Args:
        queries: the Arrow file of all queries, a batch for each part.
        parts: numbers of the parts that are wanted; None: all.
        threads: parts worked on at once.
        work: gets a part's number and its queries.
    """
    with pa.OSFile(str(queries)) as file, ThreadPoolExecutor(threads) as pool:
        reader = pa.ipc.open_file(file)
        waiting: deque[Future[Result]] = deque()
        try:
            for number in range(reader.num_record_batches) if parts is None else parts:
                # One part in wait beside those at work, no more: results are memory.
                if len(waiting) > threads:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(work, number, reader.get_batch(number)))
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def score_part(engine: Engine, queries: pa.RecordBatch, k: int, min_score: float | None) -> pa.Table:
    """The matches of distinct queries as a table of `result_schema`, by query as given, then by rank."""
    owner, column = matches_of(engine, queries.column("query").to_pylist(), MatchOptions(k, min_score))
    asked = queries.take(pa.array(owner))
    phrases = engine.phrases(column("rows"))
    columns = [
        asked.column("query"),
        asked.column("count"),
        (np.arange(len(owner)) - np.searchsorted(owner, owner) + 1).astype(np.int32),
        phrases["id"].cast(pa.large_string()),
        phrases["text"].cast(pa.large_string()),
        column("scores"),
        column("encoder"),
        column("classifier"),
        pa.nulls(len(owner), pa.float32()) if engine.calibration is None else column("relevance"),
        pa.DictionaryArray.from_arrays(column("exact").astype(np.int8), _SOURCES),
        *(phrases[name] for name in engine.user_columns.names),
    ]
    return pa.table(columns, schema=result_schema(engine))


def matches_of(
    engine: Engine, texts: list[str], options: MatchOptions
) -> tuple[np.ndarray, Callable[[str], np.ndarray]]:
    """The matches of n queries, by query as given, then by rank.

    Args:
        engine: the bundle.
        texts: the queries, n >= 1.
        options: what is asked of all of them.

    Returns:
        The query of each match, int64 (m,), and what gives a field of `Matches` by name, (m,).
    """
    owners: list[np.ndarray] = []
    found: list[Matches] = []
    for members in batches(np.fromiter(map(len, texts), np.int64, len(texts))):
        matches = engine.find(engine.encode([texts[member] for member in members]), options)
        owners.append(np.repeat(members, np.diff(matches.offsets)))
        found.append(matches)
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(matches, name) for matches in found])[order]

    return owner[order], column


def batches(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Indices (int64) of texts in batches of like lengths, fewer where texts are long.

    Args:
        lengths: int64 (n,), characters of each text.
    """
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), BATCH_QUERIES):
        members = order[start : start + BATCH_QUERIES]
        size = max(1, _BATCH_CHARS // max(1, int(lengths[members[-1]])))
        yield from (members[at : at + size] for at in range(0, len(members), size))
