from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from .conftest import Start, log_queries, write_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.tsv", log_queries(30_000))


def test_summary_as_json_and_progress_as_plain_lines(start: Start, log: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.parquet"
    with start("--input", log, "--output", output, "-k", 2, "--json") as process:
        # Steps of under a second say nothing.
        _wait_for(tmp_path / ".m.parquet.work" / "parts" / "0000000.arrow", process)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.1)
        process.send_signal(signal.SIGCONT)
        out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    summary = json.loads(out)
    table = pq.read_table(output)
    assert summary["output"] == str(output)
    assert summary["matches"] == len(table) == 2 * summary["distinct"]
    assert summary["scored"] == summary["distinct"]
    assert summary["coverage"] == 100.0
    assert summary["seconds"] > summary["scoring_seconds"] > 0
    assert summary["queries_per_second"] > 0
    assert "log.tsv: TSV, queries in 'query'" in said
    assert f"{summary['rows']:,} queries, {summary['distinct']:,} distinct, 3 empty" in said
    assert re.search(r"^scoring: [\d,]+/[\d,]+, [\d,]+ queries/s, in \d:\d\d$", said, re.MULTILINE), said
    assert "\x1b" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["m.parquet"]

    with start("--input", log, "--output", output) as process:
        out, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out == ""
    assert f"error: {output} already exists" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--input", "bad.tsv", "--output", "m.csv"], 3, "bad.tsv, line 2: has 1 cells where there are 2"),
        (["--input", "bad.tsv", "--output", "m.xlsx"], 2, "what format"),
        (["--input", "absent.tsv", "--output", "m.csv"], 2, "absent.tsv"),
        (["--input", "bad.tsv", "--output", "m.csv", "-k", "0"], 2, "-k"),
        (["--input", "bad.tsv", "--output", "m.csv", "--bundle", "."], 4, "no sound bundle"),
    ],
)
def test_exit_codes(
    start: Start,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    (tmp_path / "bad.tsv").write_text("query\tn\nred\n")
    with start(*arguments) as process:
        out, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert out == ""
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("*m.*"))


def test_two_runs_on_one_output(start: Start, log: Path, tmp_path: Path) -> None:
    arguments = ("--input", log, "--output", tmp_path / "m.parquet", "-k", 2)
    with start(*arguments) as first:
        _wait_for(tmp_path / ".m.parquet.work" / "plan.json", first)
        first.send_signal(signal.SIGSTOP)
        try:
            with start(*arguments, "--restart", "--overwrite") as second:
                _, said = second.communicate(timeout=120)
        finally:
            first.send_signal(signal.SIGCONT)
        assert second.returncode == 1
        assert "another run is writing" in said
        _, said = first.communicate(timeout=120)
    assert first.returncode == 0, said
    assert pq.read_table(tmp_path / "m.parquet").num_rows > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_scored(
    start: Start, log: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    arguments = ("--input", log, "--output", tmp_path / "m.parquet", "-k", 2, "--threads", 1, "--json")
    with start(*arguments) as process:
        _wait_for(tmp_path / ".m.parquet.work" / "parts" / "0000000.arrow", process)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert "the same command goes on with it" in said
    assert "Traceback" not in said
    assert not (tmp_path / "m.parquet").exists()
    with start(*arguments) as process:
        out, said = process.communicate(timeout=120)
    assert "were scored before" in said
    summary = json.loads(out)
    assert 0 < summary["scored"] < summary["distinct"]
    assert pq.read_table(tmp_path / "m.parquet").num_rows == summary["matches"]


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_names_that_are_not_utf_8(start: Start, tmp_path: Path) -> None:
    """A log may have one; an output may not, and it is said."""
    log = tmp_path / os.fsdecode(b"caf\xe9.tsv")
    log.write_text("query\nred shoes\n")
    with start("--input", log, "--output", tmp_path / "m.csv") as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    with start("--input", log, "--output", tmp_path / os.fsdecode(b"\xe9.csv")) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "the name" in said
    assert "is not UTF-8" in said
    assert len(list(tmp_path.iterdir())) == 2


def test_help_shows_an_example() -> None:
    command = [sys.executable, "-m", "bidmatch", "score", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert "bidmatch score --bundle runs/demo/bundle --input queries.tsv --output matches.parquet" in shown
    assert "--min-score" in shown
