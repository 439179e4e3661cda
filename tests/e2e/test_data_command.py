"""`bidmatch data` as a person runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ROWS = ["Red Shoes,running shoes,3", "blue hat,hat,1", "red shoes,running shoes,2", "old hat,hat,0"]
LOG = "\n".join(["query,phrase,clicks", *ROWS, ""])


def run(*arguments):
    command = [sys.executable, "-m", "bidmatch", "data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    return path


def test_says_what_was_recognised(log):
    done = run(log)
    assert done.returncode == 0, done.stderr
    assert "recognised: click log (CSV, UTF-8)" in done.stdout
    assert "columns: query = query, phrase = phrase, weight = clicks" in done.stdout
    assert "2 queries, 2 phrases, 2 pairs, total weight 6" in done.stdout
    assert "left out: 1 row: weight is 0 (no clicks)" in done.stdout
    assert "red shoes  ->  running shoes  x 5" in done.stdout


def test_json_and_written_pairs_read_back_alike(log, tmp_path):
    pairs = tmp_path / "out" / "pairs.tsv"
    done = run(log, "--json", "--write", pairs, "--show", 1)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["skipped"] == {"weight is 0 (no clicks)": 1}
    assert report["pairs_shown"] == [{"query": "red shoes", "phrase": "running shoes", "weight": 5.0}]
    assert sorted(pairs.read_text().splitlines()) == [
        "blue hat\that\t1",
        "query\tphrase\tweight",
        "red shoes\trunning shoes\t5",
    ]
    assert "wrote 2 pairs" in done.stderr
    again = json.loads(run(pairs, "--json").stdout)
    assert again["fingerprint"] == report["fingerprint"]


def test_a_bad_line_is_an_error_with_exit_code_3(log):
    log.write_text(LOG.replace(",1\n", ",lots\n"))
    done = run(log)
    assert done.returncode == 3
    assert done.stdout == ""
    assert f"error: {log}, line 3: the weight 'lots' is not a number" in done.stderr
    assert "--bad-lines skip" in done.stderr
    assert "Traceback" not in done.stderr
    assert run(log, "--bad-lines", "skip").returncode == 0


def test_wrong_option_values_exit_2(log):
    assert run(log, "--weight", "cost").returncode == 2
    assert run(log, "--test-share", "1").returncode == 2


def test_no_file_is_replaced_when_reading_fails(log, tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("mine")
    log.write_text("")
    assert run(log, "--write", pairs, "--overwrite").returncode == 3
    assert pairs.read_text() == "mine"


def test_help_has_an_example():
    assert "bidmatch data clicks.tsv" in run("--help").stdout
