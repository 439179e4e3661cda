from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bidmatch.base.errors import BidmatchError, ConfigError, DamagedError, InputError
from bidmatch.base.text import key
from service.engine import Engine
from service.scoring.parts import BATCH_QUERIES, score_part
from service.scoring.run import ScoreOptions, score_log

from .conftest import log_queries, write_log


@pytest.fixture(scope="module")
def engine(small_bundle: Path) -> Engine:
    return Engine.load(small_bundle)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.tsv", log_queries(3_000))


def score(bundle: Path, log: Path, output: Path, **options: object):
    return score_log(ScoreOptions(bundle=bundle, inputs=[log], output=output, **options))


def spellings(queries: list[str]) -> dict[str, str]:
    first: dict[str, str] = {}
    for query in queries:
        if key(query):
            first.setdefault(key(query), query)
    return first


@pytest.mark.parametrize(("k", "min_score"), [(10, None), (3, 1.95), (1000, None)])
def test_each_query_has_what_the_engine_gives_it(
    small_bundle: Path, engine: Engine, tmp_path: Path, k: int, min_score: float | None
) -> None:
    queries = log_queries(300)
    log = write_log(tmp_path / "log.tsv", queries)
    summary = score(small_bundle, log, tmp_path / "m.parquet", k=k, min_score=min_score, threads=2)
    table = pq.read_table(tmp_path / "m.parquet")
    distinct = spellings(queries)
    place = 0
    for one, query in distinct.items():
        alone = engine.match([query], k, min_score)
        rows = table.slice(place, len(alone.rows))
        place += len(rows)
        assert set(rows["query"].to_pylist()) <= {query}
        assert set(rows["count"].to_pylist()) <= {sum(key(other) == one for other in queries)}
        assert rows["rank"].to_pylist() == list(range(1, len(rows) + 1))
        phrases = engine.phrases(alone.rows)
        assert rows["id"].to_pylist() == phrases["id"].to_pylist()
        assert rows["phrase"].to_pylist() == phrases["text"].to_pylist()
        for name in ("encoder", "classifier"):
            np.testing.assert_allclose(rows[name].to_numpy(), getattr(alone, name), atol=1e-6)
        np.testing.assert_allclose(rows["score"].to_numpy(), alone.scores, atol=1e-6)
        assert [source == "exact" for source in rows["source"].to_pylist()] == alone.exact.tolist()
    assert place == len(table) == summary.matches
    first = table.filter(np.asarray(table["rank"]) == 1)
    empty = sum(not key(query) for query in queries)
    assert (summary.rows, summary.empty, summary.distinct) == (len(queries), empty, len(distinct))
    assert summary.matched == len(first)
    assert summary.unmatched == len(distinct) - len(first)
    assert summary.exact == table["source"].to_pylist().count("exact") > 0
    assert summary.coverage == pytest.approx(100 * len(first) / len(distinct), abs=1e-3)
    assert summary.traffic_coverage == pytest.approx(
        100 * sum(first["count"].to_pylist()) / len(queries), abs=1e-3
    )
    assert summary.matches_per_query == pytest.approx(len(table) / len(distinct), abs=1e-3)
    for quantiles, scores in (
        (summary.score_quantiles, table["score"]),
        (summary.first_score_quantiles, first["score"]),
    ):
        exact = np.quantile(scores.to_numpy(), [0.05, 0.25, 0.5, 0.75, 0.95], method="inverted_cdf")
        assert list(quantiles) == ["p5", "p25", "p50", "p75", "p95"]
        np.testing.assert_allclose(list(quantiles.values()), exact, atol=0.001)
    if min_score is not None:
        assert 0 < summary.unmatched < len(distinct)


def test_the_output_does_not_depend_on_threads(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    write_log(log, log_queries(12_000))
    for threads in (1, 3):
        score(small_bundle, log, tmp_path / f"{threads}.parquet", k=3, threads=threads)
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "3.parquet").read_bytes()
    metadata = pq.read_schema(tmp_path / "1.parquet").metadata
    assert metadata[b"bidmatch.k"] == b"3"


def test_each_distinct_query_is_scored_once(small_bundle: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.tsv", ["red shoes", " RED  shoes", "Red Shoes ", "blue"] * 500)
    summary = score(small_bundle, log, tmp_path / "m.parquet", k=1)
    assert (summary.rows, summary.distinct, summary.scored) == (2000, 2, 2)
    table = pq.read_table(tmp_path / "m.parquet", columns=["query", "count"])
    assert table.to_pylist() == [{"query": "red shoes", "count": 1500}, {"query": "blue", "count": 500}]


def test_all_output_formats_hold_the_same(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    outputs = {kind: tmp_path / f"m.{kind}" for kind in ("parquet", "csv", "tsv", "jsonl")}
    write_log(log, [*log_queries(200), 'a "quoted", query'])
    for output in outputs.values():
        score(small_bundle, log, output, k=4)
    expected = pq.read_table(outputs["parquet"]).to_pylist()
    for kind, delimiter in (("csv", ","), ("tsv", "\t")):
        with outputs[kind].open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream, delimiter=delimiter))
        assert [_typed(row) for row in rows] == expected
    assert [_typed(orjson.loads(line)) for line in outputs["jsonl"].read_bytes().splitlines()] == expected


FLOATS = ("score", "encoder", "classifier", "relevance")


def _typed(row: dict[str, str]) -> dict[str, object]:
    floats = {name: float(np.float32(row[name])) for name in FLOATS}
    return row | {name: int(row[name]) for name in ("count", "rank")} | floats


def test_all_input_formats_give_the_same(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    queries = log_queries(500)
    write_log(log, queries)
    lines = "".join(f"{query}\n" for query in queries)
    (tmp_path / "a.txt").write_text(lines, encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(lines.encode()))
    objects = "".join(json.dumps({"query": query}) + "\n" for query in queries)
    (tmp_path / "a.jsonl").write_text(objects, encoding="utf-8")
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-16") as stream:
        csv.writer(stream).writerows([["n", "query"], *enumerate(queries)])
    pq.write_table(pa.table({"query": queries}), tmp_path / "a.parquet", row_group_size=97)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "part-0.txt").write_text(lines[: lines.index("\n", 1000) + 1], encoding="utf-8")
    (folder / "part-1.txt").write_text(lines[lines.index("\n", 1000) + 1 :], encoding="utf-8")
    summary = score(small_bundle, log, tmp_path / "want.parquet", k=2)
    wanted = pq.read_table(tmp_path / "want.parquet")
    for name in ("a.txt", "a.txt.gz", "a.jsonl", "a.csv", "a.parquet", "folder"):
        other = score(small_bundle, tmp_path / name, tmp_path / "m.parquet", k=2, overwrite=True)
        assert pq.read_table(tmp_path / "m.parquet").equals(wanted), name
        assert (other.rows, other.empty) == (summary.rows, summary.empty)


@pytest.mark.parametrize("content", ["", "query\tn\n", "query\tn\n\t1\n \t2\n"])
@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_log_without_queries_gives_an_output_without_rows(
    small_bundle: Path, tmp_path: Path, content: str, kind: str
) -> None:
    (tmp_path / "log").write_text(content)
    summary = score(small_bundle, tmp_path / "log", tmp_path / f"m.{kind}")
    assert (summary.distinct, summary.matches, summary.coverage) == (0, 0, 0.0)
    assert summary.rows == summary.empty == max(0, content.count("\n") - 1)
    if kind == "parquet":
        assert pq.read_table(tmp_path / "m.parquet").num_rows == 0
    else:
        assert len((tmp_path / f"m.{kind}").read_text().splitlines()) == (kind == "csv")


def test_long_texts_beside_short_ones(engine: Engine) -> None:
    queries = ["red shoes", "cheap fan " * 30_000, "hose", "x" * 300_000] + ["blue hose"] * BATCH_QUERIES
    batch = pa.record_batch(
        {"query": pa.array(queries, pa.large_string()), "count": np.ones(len(queries), np.int64)}
    )
    table = score_part(engine, batch, 2, None)
    assert table["query"].to_pylist() == [query for query in queries for _ in range(2)]
    for at, query in enumerate(queries[:4]):
        ids = engine.phrases(engine.match([query], 2).rows)["id"].to_pylist()
        assert table["id"].to_pylist()[2 * at : 2 * at + 2] == ids


def test_what_stops_a_run_before_it_begins(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="what format"):
        score(small_bundle, log, tmp_path / "m.xlsx")
    with pytest.raises(ConfigError, match="is a folder"):
        score(small_bundle, log, tmp_path)
    with pytest.raises(ConfigError, match="is the input"):
        score(small_bundle, log, tmp_path / ".." / tmp_path.name / "log.tsv")
    with pytest.raises(InputError, match="no such file"):
        score(small_bundle, tmp_path / "absent.tsv", tmp_path / "m.csv")
    with pytest.raises(DamagedError):
        score(tmp_path, log, tmp_path / "m.csv")
    (tmp_path / "m.csv").write_text("mine")
    with pytest.raises(BidmatchError, match="already exists"):
        score(small_bundle, log, tmp_path / "m.csv")
    assert {path.name for path in tmp_path.iterdir()} == {"log.tsv", "m.csv"}
    assert (tmp_path / "m.csv").read_text() == "mine"


def test_after_a_bad_line_is_mended_the_run_begins_anew(small_bundle: Path, tmp_path: Path) -> None:
    log, output = tmp_path / "log.tsv", tmp_path / "m.csv"
    log.write_text("query\tn\nred\t1\nblue\n")
    with pytest.raises(InputError, match=r"log\.tsv, line 3: has 1 cells where there are 2"):
        score(small_bundle, log, output)
    assert {path.name for path in tmp_path.iterdir()} == {"log.tsv"}
    summary = score(small_bundle, log, output, bad_lines="skip")
    assert (summary.rows, summary.skipped) == (1, 1)
    output.unlink()
    log.write_text("query\tn\nred\t1\nblu\n")
    with pytest.raises(InputError):
        score(small_bundle, log, output)
    log.write_text("query\tn\nred\t1\nblue\t1\n")
    assert score(small_bundle, log, output).rows == 2


def test_re_scored_with_the_wide_vectors_unless_told_otherwise(
    small_wide_bundle: Path, log: Path, tmp_path: Path
) -> None:
    engine = Engine.load(small_wide_bundle)
    score(small_wide_bundle, log, tmp_path / "wide.parquet", threads=2)
    score(small_wide_bundle, log, tmp_path / "narrow.parquet", threads=2, rescore=False)
    wide, narrow = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("wide", "narrow"))
    query = wide["query"][0].as_py()
    alone = engine.match([query], 10)
    assert wide["score"].to_pylist()[: len(alone.rows)] == pytest.approx(alone.scores.tolist(), abs=1e-5)
    assert wide["score"].to_pylist() != narrow["score"].to_pylist()
    score(small_wide_bundle, log, tmp_path / "few.parquet", threads=2, candidates=10)
    assert pq.read_table(tmp_path / "few.parquet")["id"].to_pylist() != wide["id"].to_pylist()


def test_re_scoring_a_bundle_without_wide_vectors_is_refused(
    small_bundle: Path, log: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no wide vectors"):
        score(small_bundle, log, tmp_path / "m.parquet", rescore=True)
    assert not (tmp_path / "m.parquet").exists()
