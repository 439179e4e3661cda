"""`bidmatch diff` on real bundles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import log_queries, write_log


def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bidmatch", "diff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.tsv", log_queries(300))


def test_a_bundle_is_like_itself(small_bundle: Path, log: Path) -> None:
    done = diff(small_bundle, small_bundle, "--queries", log, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["by"], found["scores_comparable"]) == ("id", True)
    for part in (found["queries"], found["traffic"]):
        assert (part["overlap"], part["same_first"], part["score_shift"]) == (100.0, 100.0, 0.0)
        assert (part["gained"], part["lost"]) == (0, 0)


def test_another_ranking_and_texts(small_bundle: Path, small_wide_bundle: Path, log: Path) -> None:
    done = diff(small_bundle, small_wide_bundle, "--queries", log, "--by", "text", "-k", "5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["by"] == "text"
    assert 0 < found["queries"]["overlap"] < 100
    assert found["queries"]["matches_b"] == 5.0


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
    assert "2 rows; phrases are told by id" in done.stderr
    assert "1 bad lines skipped" in done.stderr
    assert "of A's 10 best also B's: 100.0 %" in done.stderr
    assert "score of common pairs, B less A: +0.000 on average" in done.stderr
