"""`bidmatch score --engine ray` on real Rays of this machine: its output is the local run's, whoever dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from bidmatch.base.errors import ConfigError, DamagedError
from service.engine import Engine
from service.scoring.cluster import ray_scorer
from service.scoring.distinct import PART_QUERIES, LogCounts, Shard, write_distinct
from service.scoring.parts import Job, Scorer
from service.scoring.run import OutputFolder, ScoreOptions, score_log

from .conftest import Start, log_queries, write_log

K = 30
TIMED = {"output", "seconds", "scoring_seconds", "queries_per_second", "read_seconds"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.tsv", log_queries(60_000))


@pytest.fixture(scope="module")
def local(small_bundle: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict]:
    """The output's bytes and the summary of a run without Ray."""
    output = tmp_path_factory.mktemp("local") / "m.parquet"
    summary = score_log(ScoreOptions(bundle=small_bundle, inputs=[log], output=output, k=K, threads=2))
    assert summary.distinct > 8 * PART_QUERIES
    return output.read_bytes(), summary.model_dump(exclude=TIMED)


@pytest.fixture
def ray_log(log: Path, tmp_path: Path) -> tuple[object, ...]:
    """Arguments of a run by two actors."""
    output = tmp_path / "m.parquet"
    return "--input", log, "--output", output, "-k", K, "--json", "--engine", "ray", "--actors", 2


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with ray_scorer(None, 2, 1) as scorer:
        yield scorer


def descendants(of: int) -> dict[int, str]:
    """Command lines of all processes that this one started, and those started."""
    parents, lines = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    found = {of}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: lines[pid] for pid in found - {of}}


def wait_for(reached: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def kept(folder: Path) -> int:
    return len(list((folder / ".m.parquet.work" / "parts").glob("*.arrow")))


def assert_same(process: subprocess.Popen[str], folder: Path, local: tuple[bytes, dict]) -> dict:
    """Wait for a run; that it gave what the local one gives, and said nothing that is not ours."""
    out, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    summary = json.loads(out)
    assert (folder / "m.parquet").read_bytes() == local[0]
    differing = TIMED | {"scored"}
    assert {name: value for name, value in summary.items() if name not in differing} == {
        name: value for name, value in local[1].items() if name not in differing
    }
    assert [path.name for path in folder.iterdir()] == ["m.parquet"]
    assert not re.search(r"ray|traceback|warning|\x1b", said, re.IGNORECASE), said
    return summary


@pytest.mark.parametrize("threads", [1, 2])
def test_the_output_is_that_of_the_local_run(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path, local: tuple[bytes, dict], threads: int
) -> None:
    with start(*ray_log, "--threads", threads) as process:
        summary = assert_same(process, tmp_path, local)
    assert summary["scored"] == summary["distinct"]


def test_a_killed_actor_loses_nothing(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path, local: tuple[bytes, dict]
) -> None:
    with start(*ray_log) as process:
        wait_for(lambda: kept(tmp_path), process)
        killed = 0
        while killed < 2:
            assert process.poll() is None, process.communicate()
            for pid, line in descendants(process.pid).items():
                # While it works on a part, an actor's title has the method's name.
                if killed < 2 and "_Actor" in line and "submit" in line:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        summary = assert_same(process, tmp_path, local)
    assert summary["scored"] == summary["distinct"]


@pytest.mark.parametrize("again", [["--engine", "ray"], ["--engine", "local"]])
def test_a_killed_run_is_gone_on_with_by_either_engine(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path, local: tuple[bytes, dict], again: list[str]
) -> None:
    with start(*ray_log) as process:
        wait_for(lambda: kept(tmp_path) >= 2, process)
        started = descendants(process.pid)
        assert any("raylet" in line for line in started.values())
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    done = kept(tmp_path)
    _all_gone(started)
    with start(*ray_log[:-4], *again) as process:
        summary = assert_same(process, tmp_path, local)
    assert 0 < summary["distinct"] - summary["scored"] <= done * PART_QUERIES


def _all_gone(started: dict[int, str]) -> None:
    """That processes of Ray end by themselves when the command is gone."""
    deadline = time.monotonic() + 60
    while left := [line for pid, line in started.items() if Path(f"/proc/{pid}").exists() and line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_ctrl_c_ends_ray_and_keeps_what_is_scored(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path
) -> None:
    with start(*ray_log) as process:
        wait_for(lambda: kept(tmp_path), process)
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert out == ""
    assert "the same command goes on with it" in said
    assert "Traceback" not in said
    assert kept(tmp_path)
    _all_gone(started)


def test_folders_and_shards(small_bundle: Path, log: Path, tmp_path: Path, scorer: Scorer) -> None:
    options = ScoreOptions(
        bundle=small_bundle,
        inputs=[log],
        output=tmp_path / "local",
        folder=OutputFolder(format="csv", rows_per_file=50_000),
        k=5,
        shard=Shard(number=2, of=3),
        unordered=True,
    )
    summary = score_log(options)
    on_ray = score_log(options.model_copy(update={"output": tmp_path / "ray"}), scorer)
    assert on_ray.model_dump(exclude=TIMED) == summary.model_dump(exclude=TIMED)
    assert on_ray.files > 1
    files = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "ray").iterdir()} == files


def test_an_actor_with_another_bundle_is_refused(
    small_bundle: Path, small_wide_bundle: Path, tmp_path: Path, scorer: Scorer
) -> None:
    bundle, job = _job(small_bundle, tmp_path)
    engine = Engine.load(bundle)
    bundle.rename(tmp_path / "former")
    shutil.copytree(small_wide_bundle, bundle)
    with pytest.raises(
        ConfigError, match=rf"on \S+: {bundle} is bundle \w+ .* the run is of {engine.bundle_id}"
    ):
        list(scorer(engine, job))


def test_an_actor_with_a_damaged_bundle_says_what_is_wrong(
    small_bundle: Path, tmp_path: Path, scorer: Scorer
) -> None:
    bundle, job = _job(small_bundle, tmp_path)
    engine = Engine.load(bundle)
    file = bundle / "vectors.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(
        DamagedError, match=r"on \S+: .* is no sound bundle: vectors.npy was altered"
    ) as raised:
        list(scorer(engine, job))
    assert raised.value.exit_code == 4
    assert "Copy it again" in str(raised.value)


def _job(bundle: Path, folder: Path) -> tuple[Path, Job]:
    """A copy of a bundle, and queries to score."""
    copy = folder / "bundle"
    shutil.copytree(bundle, copy)
    write_distinct(
        [pa.array(["red hose", "blue"], pa.large_string())], LogCounts(), folder / "q", folder / "s"
    )
    return copy, Job(folder / "q", range(1), 3, None, None)


def test_without_ray_the_extra_is_named(small_bundle: Path, log: Path, tmp_path: Path) -> None:
    arguments = [
        "bidmatch",
        "score",
        "--bundle",
        small_bundle,
        "--input",
        log,
        "--output",
        tmp_path / "m.csv",
    ]
    code = f"""
import sys
sys.modules["ray"] = None
sys.argv = {[*map(str, arguments), "--engine", "ray"]}
from bidmatch.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 5, done.stderr
    assert "pip install 'bidmatch[scale]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--actors", "2"], "--actors is for scoring on Ray"),
        (["--ray-address", "auto"], "--ray-address is for scoring on Ray"),
        (["--engine", "ray", "--ray-address", "ray://127.0.0.1:10001"], "by `ray job submit`"),
    ],
)
def test_options_that_do_not_go_together(
    start: Start, log: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    with start("--input", log, "--output", tmp_path / "m.csv", *options) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert message in said
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of three nodes: the first one, which the command joins, has no processors."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=1)
        yield nodes.address
    finally:
        nodes.shutdown()


def test_a_cluster_of_several_nodes(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path, local: tuple[bytes, dict], cluster: str
) -> None:
    with start(*ray_log[:-2], "--ray-address", cluster) as process:
        assert_same(process, tmp_path, local)
    with start(*ray_log[:-2], "--overwrite", "--ray-address", cluster, "--threads", 2) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "no machine of the cluster has 2 processors" in said
