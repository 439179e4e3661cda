from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bidmatch.base.text import key
from service.scoring import distinct
from service.scoring.distinct import LogCounts, Shard, write_distinct


def by_hand(queries: list[str]) -> list[tuple[str, int]]:
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for query in queries:
        if key(query):
            first.setdefault(key(query), query)
            counts[key(query)] = counts.get(key(query), 0) + 1
    return [(first[one], counts[one]) for one in first]


def found(chunks: list[list[str]], folder: Path) -> tuple[list[tuple[str, int]], LogCounts]:
    counts = LogCounts()
    out = folder / "queries.arrow"
    arrays = [pa.array(chunk, pa.large_string()) for chunk in chunks]
    write_distinct(arrays, counts, out, folder / "scratch")
    assert not (folder / "scratch").exists()
    with pa.ipc.open_file(str(out)) as reader:
        sizes = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
        table = reader.read_all()
    assert all(size == distinct.PART_QUERIES for size in sizes[:-1])
    return list(zip(table["query"].to_pylist(), table["count"].to_pylist(), strict=True)), counts


WORDS = ["a", "A", " a ", "b", "ß", "SS", "", " ", "\x00", "красный", "КРАСНЫЙ", "ﬁ", "fi", "a b", "a\tb"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=12), max_size=6),
    most=st.sampled_from([0, 100, 1 << 23]),
)
def test_what_is_distinct_and_in_what_order_does_not_depend_on_the_scratch_files(
    tmp_path: Path, chunks: list[list[str]], most: int
) -> None:
    chunks = [[query for query in chunk if _is_text(query)] for chunk in chunks]
    queries = [query for chunk in chunks for query in chunk]
    whole, distinct._MOST_BYTES = distinct._MOST_BYTES, most
    try:
        table, counts = found(chunks, tmp_path)
    finally:
        distinct._MOST_BYTES = whole
    assert table == by_hand(queries)
    assert counts.rows == len(queries)
    assert counts.empty == sum(not key(query) for query in queries)
    assert counts.distinct == len(table)


def _is_text(query: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in query)


@pytest.mark.parametrize("most", [20_000, 1 << 23])
def test_many_parts(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distinct, "_MOST_BYTES", most)
    rng = np.random.default_rng(0)
    queries = [f"Query {number}" for number in rng.zipf(1.2, 30_000) % 50_000]
    chunks = [queries[start : start + 7_000] for start in range(0, len(queries), 7_000)]
    table, _ = found(chunks, tmp_path)
    assert table == by_hand(queries)
    assert len(table) > distinct.PART_QUERIES


def test_a_part_that_ends_where_a_scratch_file_ends(tmp_path: Path) -> None:
    # 64 files of 2 ** 14 / 64 places each, so the 16th ends with the first part.
    queries = [f"query {number}" for number in range(4 * distinct.PART_QUERIES - 1)]
    assert len(queries).bit_length() == 14
    assert found([queries], tmp_path)[0] == [(query, 1) for query in queries]


@pytest.mark.parametrize("most", [0, 1 << 23])
@pytest.mark.parametrize("of", [1, 2, 7])
def test_shards_and_unordered_queries_are_the_same_ones(
    tmp_path: Path, most: int, of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distinct, "_MOST_BYTES", most)
    rng = np.random.default_rng(1)
    queries = [*WORDS, *(f"Query {number}" for number in rng.zipf(1.3, 3_000) % 900)]
    expected = by_hand(queries)
    for ordered in (True, False):
        found: list[tuple[str, int]] = []
        rows = empty = 0
        for number in range(1, of + 1):
            chunks = [
                pa.array(queries[at : at + 800], pa.large_string()) for at in range(0, len(queries), 800)
            ]
            counts = LogCounts()
            shard = Shard(number=number, of=of)
            out = tmp_path / "out.arrow"
            write_distinct(chunks, counts, out, tmp_path / "scratch", shard=shard, ordered=ordered)
            with pa.ipc.open_file(str(out)) as reader:
                table = reader.read_all()
            part = list(zip(table["query"].to_pylist(), table["count"].to_pylist(), strict=True))
            assert counts.read == len(queries)
            assert counts.distinct == len(part)
            assert counts.rows == counts.empty + sum(count for _, count in part)
            if ordered:
                assert part == [one for one in expected if one in set(part)]
            found += part
            rows += counts.rows
            empty += counts.empty
        assert sorted(found) == sorted(expected)
        assert (rows, empty) == (len(queries), sum(not key(query) for query in queries))


def test_which_shard_a_query_is_of_is_the_same_on_every_machine() -> None:
    keys = pa.array(["red shoes", "", "красные кроссовки", "x" * 300], pa.large_string())
    numbers = np.stack([Shard(number=number, of=8).holds(keys) for number in range(1, 9)])
    assert numbers.sum(0).tolist() == [1, 1, 1, 1]
    assert numbers.argmax(0).tolist() == [6, 1, 3, 2]


def test_scratch_of_a_killed_run_is_thrown_away(tmp_path: Path) -> None:
    left = tmp_path / "scratch" / "by_key"
    left.mkdir(parents=True)
    (left / "00000.arrows").write_bytes(b"half a")
    assert found([["a", "b", "a"]], tmp_path)[0] == [("a", 2), ("b", 1)]


GROWTH = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from service.scoring.distinct import LogCounts, write_distinct

for rows in (50_000, 500_000):
    chunks = (
        pa.array([f"query number {n}" for n in range(at, at + 10_000)], pa.large_string())
        for at in range(0, rows, 10_000)
    )
    counts = LogCounts()
    write_distinct(chunks, counts, Path(sys.argv[1]) / "out", Path(sys.argv[1]) / "scratch")
    print(counts.distinct, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4])
    (few, little), (many, much) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert (few, many) == (50_000, 500_000)
    # In one table, 450,000 queries more would need some 300 MB more.
    assert much - little < 64 * 1024, f"{little} to {much} KiB"


def test_a_row_is_not_divided_however_long_it_is(tmp_path: Path) -> None:
    depths = []

    def bucket(table: pa.Table, depth: int) -> np.ndarray:
        depths.append(depth)
        return np.arange(len(table)) % distinct.BUCKETS

    long = pa.table({"key": pa.array(["a" * (2 * distinct._MOST_BYTES), "b"], pa.large_string())})
    found = list(distinct.scattered([long], bucket, tmp_path / "scratch"))
    assert [len(table) for table in found] == [1, 1]
    assert depths == [0]
