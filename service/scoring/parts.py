"""Scores the distinct queries, part by part, on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
import pyarrow as pa

from bidmatch.base.console import progress, say
from bidmatch.base.files import atomic_file
from service.engine import Engine, Matches
from service.scoring.distinct import PART_QUERIES
from service.scoring.work import Work

BATCH_QUERIES = 256
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


def score_parts(
    engine: Engine, work: Work, distinct: int, k: int, min_score: float | None, threads: int
) -> int:
    """Score each part that has no results yet. Returns how many queries it scored.

    What a part holds and how it is cut into batches depends on the log alone, never on `threads` or on what
    was done before: with 8-bit products a query's vector depends a little on its neighbours in the batch.

    Args:
        engine: the bundle.
        work: holds the queries; gets the results.
        distinct: number of queries.
        k: most matches for one query.
        min_score: see `Engine.match`.
        threads: parts worked on at once.
    """
    numbers = range(-(-distinct // PART_QUERIES))
    todo = [number for number in numbers if not work.part(number).exists()]
    sizes = {number: min(PART_QUERIES, distinct - number * PART_QUERIES) for number in todo}
    total = sum(sizes.values())
    if total < distinct:
        say(f"{distinct - total:,} of {distinct:,} queries were scored before")

    schema = result_schema(engine)

    def score(number: int, batch: pa.RecordBatch) -> int:
        table = score_part(engine, batch, k, min_score)
        with (
            atomic_file(work.part(number)) as partial,
            pa.ipc.new_file(str(partial), schema, options=_LZ4) as out,
        ):
            out.write_table(table)
        return batch.num_rows

    with (
        pa.memory_map(str(work.queries)) as mapped,
        progress("scoring", total, "queries") as step,
        ThreadPoolExecutor(threads) as pool,
    ):
        reader = pa.ipc.open_file(mapped)
        running: set[Future[int]] = set()
        try:
            for number in todo:
                # One part in wait for each thread, no more: a batch is memory.
                if len(running) >= 2 * threads:
                    running = _collect(running, step.advance)
                running.add(pool.submit(score, number, reader.get_batch(number)))
            while running:
                running = _collect(running, step.advance)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return total


def _collect(running: set[Future[int]], advance: Callable[[int], None]) -> set[Future[int]]:
    """Wait for one at least; the ones that still run."""
    done, rest = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        advance(future.result())
    return rest


def score_part(engine: Engine, queries: pa.RecordBatch, k: int, min_score: float | None) -> pa.Table:
    """The matches of distinct queries as a table of `result_schema`, by query as given, then by rank."""
    texts = queries.column("query").to_pylist()
    owners: list[np.ndarray] = []
    found: list[Matches] = []
    for members in batches(np.fromiter(map(len, texts), np.int64, len(texts))):
        matches = engine.match([texts[member] for member in members], k, min_score)
        owners.append(np.repeat(members, np.diff(matches.offsets)))
        found.append(matches)
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    owner = owner[order]

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(matches, name) for matches in found])[order]

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
