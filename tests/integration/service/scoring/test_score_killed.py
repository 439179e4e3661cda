"""`kill -9` while scoring: the resumed output equals the uninterrupted one, and none is ever half made.

Three kills, one in each phase; BIDMATCH_KILLS=10 for ten, the others at random moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Start, log_queries, write_log

KILLS = int(os.environ.get("BIDMATCH_KILLS", "3"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.tsv", log_queries(60_000))


@pytest.fixture(scope="module")
def uninterrupted(start: Start, log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, float]:
    """The output's bytes, and how long the run took from start to end."""
    output = tmp_path_factory.mktemp("whole") / "m.parquet"
    began = time.monotonic()
    with start("--input", log, "--output", output, "-k", 5) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return output.read_bytes(), time.monotonic() - began


def _reading(work: Path) -> bool:
    return (work / "scratch").exists()


def _scoring(work: Path) -> bool:
    return any(work.glob("parts/*.arrow"))


def _writing(work: Path) -> bool:
    return any(work.glob(".output.whole.*"))


PHASES: list[Callable[[Path], bool]] = [_scoring, _reading, _writing]


@pytest.mark.parametrize("kill", range(KILLS))
def test_killed_and_run_again(
    start: Start, log: Path, uninterrupted: tuple[bytes, float], tmp_path: Path, kill: int
) -> None:
    whole, duration = uninterrupted
    output = tmp_path / "m.parquet"
    work = tmp_path / ".m.parquet.work"
    arguments = ("--input", log, "--output", output, "-k", 5, "--json")
    drawn = random.Random(kill)
    with start(*arguments) as process:
        if kill < len(PHASES):
            _watch(process, output, whole, lambda: PHASES[kill](work))
            moment = drawn.uniform(0, 0.05)
        else:
            moment = drawn.uniform(0, duration)
        later = time.monotonic() + moment
        _watch(process, output, whole, lambda: time.monotonic() > later)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    if output.exists():
        assert output.read_bytes() == whole
    parts = len(list(work.glob("parts/*.arrow"))) if (work / "counts.json").exists() else 0
    if kill == 0:
        assert parts > 0
    if process.returncode == 0:
        return  # it had ended before the moment came
    assert process.returncode == -signal.SIGKILL
    with start(*arguments) as process:
        out, said = process.communicate(timeout=300)
    if process.returncode == 1 and "already exists" in said:
        assert not work.exists()  # killed after the very last step
    else:
        assert process.returncode == 0, said
        summary = json.loads(out)
        if parts:
            assert summary["scored"] < summary["distinct"]
    assert output.read_bytes() == whole
    left = [path.name for path in tmp_path.iterdir() if path.name != "m.parquet"]
    assert left == [], (left, said)


def _watch(process: subprocess.Popen[str], output: Path, whole: bytes, reached: Callable[[], bool]) -> None:
    """Look at the output until the moment is reached or the process has ended: absent, or whole."""
    deadline = time.monotonic() + 300
    while not reached() and process.poll() is None:
        if output.exists():
            assert output.stat().st_size == len(whole)
        assert time.monotonic() < deadline
        time.sleep(0.0005)
