"""The simulated log as files: the project's own readers find the simulated pairs in each of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bidmatch.base.text import key
from bidmatch.commands.simulate import command
from bidmatch.demo.simulator import simulate
from bidmatch.demo.write_log import write_click_log, write_google_ads
from trainer.data.read import Log, read_log

N_PHRASES, N_QUERIES, SEED = 700, 2500, 11


@pytest.fixture(scope="module")
def simulated() -> Counter:
    pairs: Counter = Counter()
    for block in simulate(N_PHRASES, N_QUERIES, SEED):
        for query, text, clicks in zip(
            block.queries.to_pylist(), block.texts.to_pylist(), block.clicks.tolist(), strict=True
        ):
            pairs[key(query), key(text)] += clicks
    return pairs


def pairs_of(log: Log) -> Counter:
    clicks = log.interactions.clicks.tocoo()
    queries = log.interactions.queries.to_pylist()
    texts = [key(text) for text in log.phrases["text"].to_pylist()]
    return Counter(
        {
            (queries[row], texts[column]): int(value)
            for row, column, value in zip(clicks.row, clicks.col, clicks.data, strict=True)
        }
    )


def test_click_log_reads_back(tmp_path: Path, simulated: Counter):
    path = tmp_path / "log.tsv"
    summary = write_click_log(path, N_PHRASES, N_QUERIES, SEED)
    log = read_log([path])
    assert pairs_of(log) == simulated
    assert log.report.phrases == summary.phrases == N_PHRASES
    assert log.report.rows == summary.rows
    assert log.report.total_weight == summary.clicks == sum(simulated.values())
    assert summary.bytes == path.stat().st_size
    assert summary.searches == N_QUERIES


@pytest.mark.parametrize(("name", "start"), [("r.csv", b"\xef\xbb\xbf"), ("r.tsv", b"\xff\xfe")])
def test_google_ads_report_reads_back(tmp_path: Path, simulated: Counter, name: str, start: bytes):
    path = tmp_path / name
    write_google_ads(path, N_PHRASES, N_QUERIES, SEED)
    assert path.read_bytes().startswith(start)
    log = read_log([path])
    assert "Google Ads" in log.report.format
    assert pairs_of(log) == simulated
    assert log.report.phrases == N_PHRASES
    assert set(log.phrases["match_type"].to_pylist()) == {"exact", "phrase", "broad"}
    assert log.report.skipped == {"total line": 1}


def test_same_arguments_same_bytes(tmp_path: Path):
    for number, name in enumerate(("a.tsv", "b.tsv")):
        write_click_log(tmp_path / name, 300, 900, seed=2)
        write_google_ads(tmp_path / f"{number}.csv", 300, 900, seed=2)
    write_click_log(tmp_path / "c.tsv", 300, 900, seed=3)
    assert (tmp_path / "a.tsv").read_bytes() == (tmp_path / "b.tsv").read_bytes()
    assert (tmp_path / "0.csv").read_bytes() == (tmp_path / "1.csv").read_bytes()
    assert (tmp_path / "a.tsv").read_bytes() != (tmp_path / "c.tsv").read_bytes()


def test_the_command_says_what_it_wrote(tmp_path: Path):
    path = tmp_path / "deep" / "log.tsv"
    arguments = ["--phrases", "100", "--queries", "300", "--out", str(path), "--json"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    said = orjson.loads(done.stdout)
    assert done.exit_code == 0
    assert said["phrases"] == 100
    assert said["searches"] == 300
    assert path.read_text(encoding="utf-8").startswith("query\tphrase\tclicks\n")
    assert len(path.read_text(encoding="utf-8").splitlines()) == said["rows"] + 1


def test_nothing_is_left_of_a_log_that_cannot_be(tmp_path: Path):
    arguments = ["--phrases", "1000", "--queries", "3", "--out", str(tmp_path / "log.tsv")]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code != 0
    assert list(tmp_path.iterdir()) == []
