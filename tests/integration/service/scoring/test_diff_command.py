"""`bidmatch diff` on real bundles and on files of matches, as a process of its own."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from bidmatch.base.text import key

from .conftest import Start, log_queries, write_log


def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bidmatch", "diff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def figures(*arguments: object) -> dict[str, object]:
    done = diff(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.tsv", log_queries(300))


@pytest.fixture(scope="module")
def scored(start: Start, log: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What `bidmatch score` writes of the log, five matches a query, in each format."""
    folder = tmp_path_factory.mktemp("scored")
    files = {end: folder / f"matches.{end}" for end in ("parquet", "tsv.gz", "csv.zst", "jsonl")}
    for file in files.values():
        with start("--input", log, "--output", file, "-k", 5) as process:
            _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    return files


def test_a_bundle_is_like_itself(small_bundle: Path, log: Path) -> None:
    found = figures(small_bundle, small_bundle, "--queries", log)
    assert (found["by"], found["scores_comparable"], found["same_bundle"]) == ("id", True, True)
    assert found["notes"] == ["A and B are the same bundle"]
    for part in (found["queries"], found["traffic"]):
        assert (part["overlap"], part["same_first"], part["score_shift"]) == (100.0, 100.0, 0.0)
        assert part["overlap_bands"]["100"] == part["queries"]
        assert set(part["score_shift_quantiles"].values()) == {0.0}
        assert (part["gained"], part["lost"], part["relevance_shift"]) in [(0, 0, 0.0), (0, 0, None)]
    assert found["examples"] == {"lost": [], "gained": [], "changed": []}
    assert found["phrases"] == {"gained": [], "lost": []}


def test_another_ranking_and_texts(small_bundle: Path, small_wide_bundle: Path, log: Path) -> None:
    options = ("--by", "text", "-k", "5", "--examples", "3")
    found = figures(small_bundle, small_wide_bundle, "--queries", log, *options)
    assert found["by"] == "text"
    assert 0 < found["queries"]["overlap"] < 100
    assert found["queries"]["matches_b"] == 5.0
    assert found["notes"] == ["scores are not compared: only one of A and B re-scores with wide vectors"]
    assert found["queries"]["score_shift"] is None
    assert len(found["examples"]["changed"]) == len(found["phrases"]["gained"]) == 3
    first = found["examples"]["changed"][0]
    assert first["common"] + len(first["lost"]) == first["common"] + len(first["gained"]) == 5


@pytest.mark.parametrize("end", ["parquet", "tsv.gz", "csv.zst", "jsonl"])
def test_what_score_writes_is_like_the_bundle(
    small_bundle: Path, scored: dict[str, Path], log: Path, end: str
) -> None:
    found = figures(scored[end], small_bundle, "--queries", log, "-k", "5")
    assert (found["by"], found["scores_comparable"]) == ("id", False)
    assert (found["bundle_a"], found["a"]) == (None, str(scored[end]))
    assert found["notes"] == ["scores are not compared: a file's may be on another scale than a bundle's"]
    for part in (found["queries"], found["traffic"]):
        assert (part["overlap"], part["same_first"], part["matches_a"]) == (100.0, 100.0, 5.0)
        assert part["score_shift"] is None


def test_a_file_that_lacks_queries_and_phrases(
    small_bundle: Path, scored: dict[str, Path], log: Path, tmp_path: Path
) -> None:
    rows = pq.read_table(scored["parquet"]).to_pylist()
    gone = max(rows, key=lambda row: row["count"])
    # Another service: the most searched query has nothing, of each other one the first phrase is another.
    kept = [
        {
            "query": row["query"].upper(),
            "phrase": row["phrase"] if row["rank"] > 1 else "a phrase of another service",
            "rank": row["rank"],
        }
        for row in reversed(rows)
        if row["query"] != gone["query"]
    ]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in kept))
    output = tmp_path / "changes.parquet"
    found = figures(small_bundle, other, "--queries", log, "-k", "5", "--output", output)
    assert (found["by"], found["bundle_b"]) == ("text", None)
    once, traffic = found["queries"], found["traffic"]
    n = once["queries"]
    assert (once["lost"], once["gained"], traffic["lost"]) == (1, 0, gone["count"])
    assert once["overlap"] == pytest.approx(80 * (n - 1) / n, abs=1e-3)
    bands = {name: many for name, many in once["overlap_bands"].items() if many}
    assert bands == {"0": 1, "(75,100)": n - 1}
    assert once["same_first"] == 0.0
    assert [one["query"] for one in found["examples"]["lost"]] == [gone["query"]]
    assert [one["phrase"] for one in found["phrases"]["gained"]] == ["a phrase of another service"]
    assert found["phrases"]["gained"][0]["change"] == traffic["queries"] - gone["count"]
    changes = pq.read_table(output)
    assert changes.column_names == [
        *("query", "count", "matches_a", "matches_b", "common", "same_first", "lost", "gained")
    ]
    lists = {row["query"]: row for row in changes.to_pylist()}
    assert list(lists) == list(dict.fromkeys(row["query"] for row in rows))
    assert lists[gone["query"]] == {
        "query": gone["query"],
        "count": gone["count"],
        "matches_a": 5,
        "matches_b": 0,
        "common": 0,
        "same_first": None,
        "lost": [row["phrase"] for row in rows if row["query"] == gone["query"]],
        "gained": [],
    }
    assert Counter(row["common"] for row in lists.values()) == {4: n - 1, 0: 1}


def test_changes_as_text_and_what_is_said(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("query,phrase\nred hose,Red Garden Hose\nred hose,something else\n")
    output = tmp_path / "out" / "changes.tsv"
    arguments = (small_bundle, other, "--queries", log, "-k", "2", "--output", output)
    done = diff(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "other.csv: CSV, query in 'query', phrase in 'phrase'" in done.stderr
    assert "Most searched queries that B has no match for and A has" in done.stderr
    assert f"a row for each query: {output}" in done.stderr
    with output.open(newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    assert len(rows) == len({key(query) for query in log_queries(300)} - {""})
    assert [path.name for path in output.parent.iterdir()] == ["changes.tsv"]
    again = diff(*arguments)
    assert again.returncode == 1
    assert "already exists" in again.stderr
    assert diff(*arguments, "--overwrite").returncode == 0


def test_outputs_that_are_refused(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    for output, code, message in (
        (log, 2, "is an input"),
        (tmp_path / "changes.xlsx", 2, "what format"),
        (small_bundle / "changes.tsv", 1, "is inside"),
    ):
        done = diff(small_bundle, small_bundle, "--queries", log, "--output", output, "--overwrite")
        assert done.returncode == code, done.stderr
        assert message in done.stderr
    assert log.read_text().startswith("query\t")


def test_an_output_that_the_next_run_would_read_is_refused(
    small_bundle: Path, scored: dict[str, Path], log: Path, tmp_path: Path
) -> None:
    logs, matches = tmp_path / "logs", tmp_path / "matches"
    for folder, file in ((logs, log), (matches, scored["parquet"])):
        folder.mkdir()
        shutil.copy(file, folder)
    for a, queries, output in (
        (small_bundle, logs, logs / "changes.tsv"),
        (small_bundle, logs / "*.tsv", logs / "changes.tsv"),
        (matches, log, matches / "changes.tsv"),
    ):
        done = diff(a, small_bundle, "--queries", queries, "--output", output)
        assert done.returncode == 2, done.stderr
        assert "all of which is read" in done.stderr
    assert len(list(logs.iterdir())) == len(list(matches.iterdir())) == 1


def test_sigterm_leaves_nothing(small_bundle: Path, tmp_path: Path) -> None:
    log, output, scratch = (
        write_log(tmp_path / "log.tsv", log_queries(30_000)),
        tmp_path / "out",
        tmp_path / "t",
    )
    output.mkdir()
    scratch.mkdir()
    arguments = [small_bundle, small_bundle, "--queries", log, "--output", output / "changes.tsv"]
    command = [sys.executable, "-m", "bidmatch", "diff", *map(str, arguments)]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while process.poll() is None and not any(output.iterdir()):
            time.sleep(0.001)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert list(output.iterdir()) == list(scratch.iterdir()) == []


def test_ids_that_are_alike_by_chance(
    small_bundle: Path, log: Path, scored: dict[str, Path], tmp_path: Path
) -> None:
    table = pq.read_table(scored["parquet"]).select(["query", "id", "phrase", "rank"])
    numbered = {one: f"p{53 - int(one[1:])}" for one in table["id"].unique().to_pylist()}
    ids = pa.array([numbered[one] for one in table["id"].to_pylist()])
    pcsv.write_csv(table.set_column(1, "id", ids), tmp_path / "other.csv")
    found = figures(small_bundle, tmp_path / "other.csv", "--queries", log, "-k", "5")
    assert (found["by"], found["queries"]["overlap"]) == ("text", 100.0)
    assert "belong to different texts, so phrases are told by text, not by id" in found["notes"][-1]
    forced = figures(small_bundle, tmp_path / "other.csv", "--queries", log, "-k", "5", "--by", "id")
    assert forced["queries"]["overlap"] < 100
    assert "ids may be alike by chance" in forced["notes"][-1]


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ("query\tclicks\nred hose\t1\n", 3, "m.tsv: has no column 'phrase' or 'id'"),
        ("query\tphrase\trank\nred hose\tx\tone\n", 3, "m.tsv, line 2: column 'rank' holds 'one'"),
        ("", 3, "m.tsv: holds no matches"),
        (None, 2, "m.tsv does not exist"),
    ],
)
def test_bad_files_of_matches(
    small_bundle: Path, log: Path, tmp_path: Path, content: str | None, code: int, message: str
) -> None:
    path = tmp_path / "m.tsv"
    if content is not None:
        path.write_text(content)
    done = diff(small_bundle, path, "--queries", log)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_bundle_is_no_folder_of_matches(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    (tmp_path / "vectors.npy").write_bytes(b"x")
    done = diff(small_bundle, tmp_path, "--queries", log)
    assert done.returncode == 4, done.stderr


def test_a_missing_log_is_a_wrong_option(small_bundle: Path) -> None:
    done = diff(small_bundle, small_bundle, "--queries", "absent.tsv")
    assert done.returncode == 2
    assert "absent.tsv" in done.stderr


def test_a_log_is_read_as_score_reads_it(small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("kühler garden hose\n".encode("cp1252"))
    (tmp_path / "b.txt").write_text(f"red garden hose\n{'x' * 1_100_000}\n")
    pattern = tmp_path / "*.txt"
    bare = diff(small_bundle, small_bundle, "--queries", pattern)
    assert bare.returncode == 3
    assert "--encoding cp1252" in bare.stderr
    options = ("--encoding", "cp1252", "--bad-lines", "skip")
    done = diff(small_bundle, small_bundle, "--queries", pattern, *options)
    assert done.returncode == 0, done.stderr
    assert "2 rows, 2 distinct queries; the 10 best matches of each; phrases are told by id" in done.stderr
    assert "1 bad lines skipped" in done.stderr
