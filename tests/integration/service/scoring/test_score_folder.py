"""Outputs that are folders, shards of a log, and packed text."""

from __future__ import annotations

import gzip
import json
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from bidmatch.base.errors import BidmatchError, ConfigError
from bidmatch.base.text import key
from bidmatch.commands.score import command
from service.scoring.distinct import PART_QUERIES, Shard
from service.scoring.output import Summary
from service.scoring.run import OutputFolder, ScoreOptions, score_log

from .conftest import Start, log_queries, write_log


def score(bundle: Path, log: Path, output: Path, **options: object) -> Summary:
    return score_log(ScoreOptions(bundle=bundle, inputs=[log], output=output, **options))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rows_of(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("part-*.parquet"))])


def in_order(table: pa.Table) -> list[dict[str, object]]:
    return sorted(table.to_pylist(), key=lambda row: (row["query"], row["rank"]))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.tsv", log_queries(9_000))


@pytest.fixture(scope="module")
def whole(
    small_bundle: Path, log: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pa.Table, Summary]:
    output = tmp_path_factory.mktemp("whole") / "m.parquet"
    summary = score(small_bundle, log, output, k=3)
    assert summary.distinct > PART_QUERIES
    return pq.read_table(output), summary


@pytest.mark.parametrize("threads", [1, 3])
def test_files_of_a_folder_are_the_output_cut_in_pieces(
    small_bundle: Path, log: Path, whole: tuple[pa.Table, Summary], tmp_path: Path, threads: int
) -> None:
    table, one = whole
    folder = OutputFolder(rows_per_file=5_000)
    summary = score(small_bundle, log, tmp_path / "m", k=3, folder=folder, threads=threads)
    files = -(-len(table) // 5_000)
    assert names(tmp_path / "m") == ["_SUCCESS", *(f"part-{n:05}.parquet" for n in range(files))]
    sizes = [pq.read_metadata(file).num_rows for file in sorted((tmp_path / "m").glob("part-*"))]
    assert sizes == [5_000] * (files - 1) + [len(table) - 5_000 * (files - 1)]
    assert rows_of(tmp_path / "m").equals(table)
    assert names(tmp_path) == ["m"]
    assert summary.files == files
    timed = {"output", "files", "seconds", "scoring_seconds", "queries_per_second", "read_seconds"}
    assert summary.model_dump(exclude=timed) == one.model_dump(exclude=timed)


def test_a_file_that_ends_where_the_results_end(
    small_bundle: Path, log: Path, whole: tuple[pa.Table, Summary], tmp_path: Path
) -> None:
    score(small_bundle, log, tmp_path / "m", k=3, folder=OutputFolder(rows_per_file=len(whole[0])))
    assert names(tmp_path / "m") == ["_SUCCESS", "part-00000.parquet"]
    assert rows_of(tmp_path / "m").equals(whole[0])


@pytest.mark.parametrize("end", ["csv", "csv.gz", "csv.zst", "tsv.gz", "jsonl.gz", "jsonl.zst"])
def test_packed_text_holds_what_plain_text_holds(small_bundle: Path, tmp_path: Path, end: str) -> None:
    log = write_log(tmp_path / "log.tsv", log_queries(200))
    kind = end.partition(".")[0]
    score(small_bundle, log, tmp_path / f"plain.{kind}", k=2)
    plain = (tmp_path / f"plain.{kind}").read_bytes()
    score(small_bundle, log, tmp_path / f"packed.{end}", k=2)
    score(small_bundle, log, tmp_path / "folder", k=2, folder=OutputFolder(format=end, rows_per_file=10**6))
    for path in (tmp_path / f"packed.{end}", tmp_path / "folder" / f"part-00000.{end}"):
        raw = path.read_bytes()
        if end.endswith("gz"):
            raw = gzip.decompress(raw)
        elif end.endswith("zst"):
            raw = pa.input_stream(path, compression="zstd").read()
        assert raw == plain
    # What is written can be read again.
    again = score(small_bundle, tmp_path / f"packed.{end}", tmp_path / "again.csv", k=1)
    assert again.distinct > 0


def test_each_text_file_of_a_folder_has_a_header_line(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    folder = OutputFolder(format="csv", rows_per_file=7_000)
    summary = score(small_bundle, log, tmp_path / "m", k=2, folder=folder)
    tables = [pcsv.read_csv(file) for file in sorted((tmp_path / "m").glob("*.csv"))]
    assert len(tables) == summary.files > 1
    assert sum(map(len, tables)) == summary.matches
    assert {table.column_names[0] for table in tables} == {"query"}


def test_a_log_without_matches_gives_one_file_with_the_columns(small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("query\tn\n\t1\n")
    summary = score(small_bundle, tmp_path / "log", tmp_path / "m", folder=OutputFolder())
    assert names(tmp_path / "m") == ["_SUCCESS", "part-00000.parquet"]
    assert (summary.files, rows_of(tmp_path / "m").num_rows) == (1, 0)
    assert "phrase" in rows_of(tmp_path / "m").column_names


def test_shards_have_together_the_rows_of_the_whole(
    small_bundle: Path, log: Path, whole: tuple[pa.Table, Summary], tmp_path: Path
) -> None:
    table, one = whole
    shards = [
        score(small_bundle, log, tmp_path / f"{n}.parquet", k=3, shard=Shard(number=n, of=3), threads=n)
        for n in (1, 2, 3)
    ]
    tables = [pq.read_table(tmp_path / f"{n}.parquet") for n in (1, 2, 3)]
    assert in_order(pa.concat_tables(tables)) == in_order(table)
    places = {query: place for place, query in enumerate(dict.fromkeys(table["query"].to_pylist()))}
    for part in tables:
        inside = [places[query] for query in part["query"].to_pylist()]
        assert inside == sorted(inside)
    for name in ("rows", "distinct", "empty", "matches", "exact", "matched", "unmatched", "scored"):
        assert sum(getattr(shard, name) for shard in shards) == getattr(one, name), name
    assert min(shard.distinct for shard in shards) > one.distinct / 4
    assert {shard.read_rows for shard in shards} == {one.rows}
    assert [shard.shard for shard in shards] == ["1/3", "2/3", "3/3"]
    score(small_bundle, log, tmp_path / "1of1.parquet", k=3, shard=Shard(number=1, of=1))
    assert pq.read_table(tmp_path / "1of1.parquet").equals(table)


def test_a_query_is_of_one_shard_however_it_is_spelled_and_wherever_it_stands(
    small_bundle: Path, tmp_path: Path
) -> None:
    log = write_log(tmp_path / "log.tsv", ["red shoes", "RED shoes", " red  shoes", "blue hose"] * 50)
    found = []
    for number in (1, 2):
        output = tmp_path / f"{number}.parquet"
        score(small_bundle, log, output, k=1, shard=Shard(number=number, of=2))
        found += pq.read_table(output, columns=["query", "count"]).to_pylist()
    assert sorted(found, key=lambda row: row["query"]) == [
        {"query": "blue hose", "count": 50},
        {"query": "red shoes", "count": 150},
    ]


def test_unordered_has_the_same_rows(
    small_bundle: Path, log: Path, whole: tuple[pa.Table, Summary], tmp_path: Path
) -> None:
    table, one = whole
    folder = OutputFolder(rows_per_file=4_000)
    summary = score(small_bundle, log, tmp_path / "m", k=3, folder=folder, unordered=True, threads=2)
    assert in_order(rows_of(tmp_path / "m")) == in_order(table)
    assert summary.score_quantiles == one.score_quantiles
    assert (summary.rows, summary.distinct, summary.coverage) == (one.rows, one.distinct, one.coverage)


def test_a_folder_that_is_there_is_replaced_when_told_and_only_if_it_is_a_run_s(
    small_bundle: Path, log: Path, tmp_path: Path
) -> None:
    output, folder = tmp_path / "m", OutputFolder(rows_per_file=3_000)
    output.mkdir()
    first = score(small_bundle, log, output, k=2, folder=folder)
    assert first.files > 3
    with pytest.raises(BidmatchError, match="already exists"):
        score(small_bundle, log, output, k=1, folder=folder)
    again = score(small_bundle, log, output, k=1, folder=OutputFolder(format="csv"), overwrite=True)
    assert again.files == 1
    assert names(output) == ["_SUCCESS", "part-00000.csv"]
    (output / "mine.txt").write_text("mine")
    with pytest.raises(BidmatchError, match="holds other files"):
        score(small_bundle, log, output, k=1, folder=folder, overwrite=True)
    assert names(output) == ["_SUCCESS", "mine.txt", "part-00000.csv"]
    assert names(tmp_path) == ["m"]


def test_what_a_folder_cannot_be(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names a file"):
        score(small_bundle, log, tmp_path / "m.csv", folder=OutputFolder())
    with pytest.raises(ConfigError, match="no output format 'xlsx'"):
        score(small_bundle, log, tmp_path / "m", folder=OutputFolder(format="xlsx"))
    with pytest.raises(ConfigError, match="--unordered is for an output of several files"):
        score(small_bundle, log, tmp_path / "m.csv", unordered=True)
    with pytest.raises(ConfigError, match="is the input, or holds it"):
        score(small_bundle, log, log.parent, folder=OutputFolder(), overwrite=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "0/3"], "not one of 1/N to N/N"),
        (["--shard", "4/3"], "not one of 1/N to N/N"),
        (["--shard", "2"], "not one of 1/N to N/N"),
        (["--rows-per-file", "0"], "--rows-per-file"),
    ],
)
def test_options_that_say_nothing(
    small_bundle: Path, log: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    given = ["--bundle", str(small_bundle), "--input", str(log), "--output", f"{tmp_path}/m/", *arguments]
    done = CliRunner().invoke(command, given)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("unordered", [False, True])
def test_killed_while_it_writes_a_folder(start: Start, tmp_path: Path, unordered: bool) -> None:
    log = write_log(tmp_path / "log.tsv", log_queries(60_000))
    ways = ["--unordered"] * unordered
    arguments = ("--input", log, "-k", 5, "--rows-per-file", 40_000, "--json", *ways)
    with start(*arguments, "--output", f"{tmp_path}/whole/") as process:
        out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    expected = json.loads(out)
    assert expected["files"] > 3

    output = tmp_path / "m"
    for kill in range(3):
        with start(*arguments, "--output", f"{output}/") as process:
            deadline = time.monotonic() + 120
            while not (output / f"part-{kill:05}.parquet").exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(0.01 * kill)
            process.send_signal(signal.SIGKILL)
            _, said = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, said
        assert not (output / "_SUCCESS").exists()
        left = {path.name: path.read_bytes() for path in output.glob("part-*")}
        assert len(left) > kill
        assert left == {name: wanted[name] for name in left}
        # No results are kept beside those that are written.
        assert not list((tmp_path / ".m.work" / "parts").iterdir())
    with start(*arguments, "--output", f"{output}/") as process:
        out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert {path.name: path.read_bytes() for path in output.iterdir()} == wanted
    summary = json.loads(out)
    assert 0 < summary["scored"] < summary["distinct"]
    timed = {"output", "scored", "seconds", "scoring_seconds", "queries_per_second", "read_seconds"}
    for name in expected.keys() - timed:
        assert summary[name] == expected[name], name
    assert not (tmp_path / ".m.work").exists()


def test_another_plan_for_a_folder_that_is_half_written(start: Start, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.tsv", log_queries(60_000))
    output = tmp_path / "m"
    arguments = ("--input", log, "-k", 5, "--output", f"{output}/", "--json")
    with start(*arguments, "--rows-per-file", 40_000) as process:
        deadline = time.monotonic() + 120
        while not (output / "part-00001.parquet").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    with start(*arguments, "--rows-per-file", 50_000) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "rows_per_file: 40000, now 50000" in said
    with start(*arguments, "--rows-per-file", 500_000, "--shard", "1/2", "--restart") as process:
        out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    summary = json.loads(out)
    assert len(rows_of(output)) == summary["matches"]
    assert names(output) == ["_SUCCESS", *(f"part-{n:05}.parquet" for n in range(summary["files"]))]


def test_a_packed_log_of_folders_and_duplicates(start: Start, small_bundle: Path, tmp_path: Path) -> None:
    queries = log_queries(3_000)
    days = tmp_path / "logs"
    for day in range(3):
        (days / f"date=2026-01-0{day + 1}").mkdir(parents=True)
        lines = "query\tn\n" + "".join(f"{query}\t1\n" for query in queries[day::3])
        raw = lines.encode()
        packed = gzip.compress(raw) if day == 1 else pa.compress(raw, codec="zstd", asbytes=True)
        (days / f"date=2026-01-0{day + 1}" / f"part-0.tsv.{'gz' if day == 1 else 'zst'}").write_bytes(packed)
        (days / f"date=2026-01-0{day + 1}" / "_SUCCESS").touch()
    for given in (days, days / "**" / "*.tsv.*", days / "date=*"):
        with start("--input", given, "--output", tmp_path / "m.csv.zst", "--json", "--overwrite") as process:
            out, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        summary = json.loads(out)
        assert summary["rows"] == summary["read_rows"] == len(queries)
        assert summary["distinct"] == len({key(query) for query in queries} - {""})
        assert summary["empty"] == sum(not key(query) for query in queries)
        assert summary["read_bytes"] == sum(file.stat().st_size for file in days.rglob("*.tsv.*"))
    with start("--input", days / "*.txt", "--output", tmp_path / "m.csv") as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "no file matches this pattern" in said


def test_an_output_that_the_next_run_would_read_is_refused(
    small_bundle: Path, log: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "q.tsv").write_bytes(log.read_bytes())
    for given, output, folder in (
        (logs, logs / "m.tsv", None),
        (logs, logs / "deep" / "m", OutputFolder()),
        (logs / "*", logs / "m.csv", None),
        (logs / "*", logs / "deep" / "m", OutputFolder()),
        (logs / "*.tsv", logs / "m.tsv", None),
        (tmp_path / "l*" / "**" / "*.tsv", logs / "deep" / "deeper" / "m.tsv", None),
    ):
        with pytest.raises(ConfigError, match="all of which is read"):
            score(small_bundle, given, output, folder=folder)
    assert names(logs) == ["q.tsv"]
    score(small_bundle, logs / "*.tsv", logs / "m.csv")
    score(small_bundle, logs / "q*", tmp_path / "m", folder=OutputFolder())
