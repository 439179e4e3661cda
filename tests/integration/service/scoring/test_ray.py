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
from contextlib import nullcontext
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

K = 20
TIMED = {"output", "seconds", "scoring_seconds", "queries_per_second", "read_seconds"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.tsv", log_queries(50_000))


@pytest.fixture(scope="module")
def local(small_bundle: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict]:
    """The output's bytes and the summary of a run without Ray."""
    output = tmp_path_factory.mktemp("local") / "m.parquet"
    summary = score_log(ScoreOptions(bundle=small_bundle, inputs=[log], output=output, k=K, threads=2))
    assert summary.distinct > 6 * PART_QUERIES
    return output.read_bytes(), summary.model_dump(exclude=TIMED)


@pytest.fixture
def ray_log(log: Path, tmp_path: Path) -> tuple[object, ...]:
    """Arguments of a run by two actors."""
    output = tmp_path / "m.parquet"
    return "--input", log, "--output", output, "-k", K, "--json", "--engine", "ray", "--actors", 2


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray would ask for a token, and have all that this process starts ask for one.
        patch.setenv("RAY_AUTH_MODE", "disabled")
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


def assert_same(process: subprocess.Popen[str], folder: Path, local: tuple[bytes, dict]) -> tuple[dict, str]:
    """Wait for a run, which must give what the local one gives: its summary, and what it said."""
    out, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    summary = json.loads(out)
    assert (folder / "m.parquet").read_bytes() == local[0]
    differing = TIMED | {"scored"}
    assert {name: value for name, value in summary.items() if name not in differing} == {
        name: value for name, value in local[1].items() if name not in differing
    }
    assert [path.name for path in folder.iterdir()] == ["m.parquet"]
    return summary, said


def assert_gone(started: dict[int, str]) -> None:
    """That Ray's processes end when the command is gone; those of its dashboard take their time."""
    ours = [pid for pid, line in started.items() if re.search(r"gcs_server|raylet/raylet|_Actor", line)]
    assert len(ours) >= 3, started
    deadline = time.monotonic() + 60
    while [pid for pid in ours if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, [started[pid] for pid in ours]
        time.sleep(0.1)


def test_the_output_is_that_of_the_local_run(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path, local: tuple[bytes, dict]
) -> None:
    with start(*ray_log, "--threads", 2) as process:
        summary, said = assert_same(process, tmp_path, local)
    assert summary["scored"] == summary["distinct"]
    # Ray's own lines begin with the time.
    theirs = [
        line for line in said.splitlines() if re.search(r"^\[?\d{4}-|warning|traceback|\x1b", line, re.I)
    ]
    assert all("Set ray log level" in line for line in theirs), said


def test_killed_actors_lose_nothing(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path, local: tuple[bytes, dict]
) -> None:
    with start(*ray_log) as process:
        wait_for(lambda: kept(tmp_path), process)
        killed: set[int] = set()
        while len(killed) < 2:
            assert process.poll() is None, process.communicate()
            for pid, line in descendants(process.pid).items():
                # While it works on a part, an actor's title has the method's name.
                if "_Actor" in line and "submit" in line and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        summary, _ = assert_same(process, tmp_path, local)
    assert summary["scored"] == summary["distinct"]


@pytest.mark.parametrize(
    ("number", "code", "engine"),
    [(signal.SIGKILL, -signal.SIGKILL, "ray"), (signal.SIGINT, 130, "local")],
)
def test_a_stopped_run_is_gone_on_with_by_either_engine(
    start: Start,
    ray_log: tuple[object, ...],
    tmp_path: Path,
    local: tuple[bytes, dict],
    number: signal.Signals,
    code: int,
    engine: str,
) -> None:
    with start(*ray_log) as process:
        wait_for(lambda: kept(tmp_path) >= 2, process)
        started = descendants(process.pid)
        process.send_signal(number)
        out, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert out == ""
    assert "Traceback" not in said
    done = kept(tmp_path)
    assert_gone(started)
    arguments = ray_log if engine == "ray" else ray_log[:-4]
    with start(*arguments) as process:
        summary, said = assert_same(process, tmp_path, local)
    assert 0 < summary["distinct"] - summary["scored"] <= done * PART_QUERIES
    assert "were scored before" in said


def test_folders_and_shards(small_bundle: Path, log: Path, tmp_path: Path, scorer: Scorer) -> None:
    options = ScoreOptions(
        bundle=small_bundle,
        inputs=[log],
        output=tmp_path / "local",
        folder=OutputFolder(format="csv", rows_per_file=20_000),
        k=5,
        shard=Shard(number=2, of=3),
        unordered=True,
    )
    summary = score_log(options)
    on_ray = score_log(options.model_copy(update={"output": tmp_path / "ray"}), nullcontext(scorer))
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


@pytest.fixture
def without_ray(small_bundle: Path, log: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """What `--engine ray` does where Ray is not installed; the output is `m.csv`."""
    arguments = ["score", "--bundle", small_bundle, "--input", log, "--output", tmp_path / "m.csv"]
    code = f"""
import sys
sys.modules["ray"] = None
sys.argv = {["bidmatch", *map(str, arguments), "--engine", "ray"]}
from bidmatch.cli import main
main()
"""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_without_ray_the_extra_is_named(
    without_ray: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    assert without_ray.returncode == 5, without_ray.stderr
    assert "pip install 'bidmatch[scale]'" in without_ray.stderr
    assert "Traceback" not in without_ray.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def in_the_way(tmp_path: Path) -> Path:
    path = tmp_path / "m.csv"
    path.write_text("mine")
    return path


def test_ray_is_asked_for_when_all_else_is_well(
    in_the_way: Path, without_ray: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    assert without_ray.returncode == 1, without_ray.stderr
    assert f"{in_the_way} already exists" in without_ray.stderr
    assert in_the_way.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [in_the_way]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--actors", "2"], "--actors is for scoring on Ray"),
        (["--ray-address", "auto"], "--ray-address is for scoring on Ray"),
        (["--engine", "ray", "--ray-address", "ray://127.0.0.1:10001"], "by `ray job submit`"),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
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


_CLUSTER = """
from ray.cluster_utils import Cluster
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    nodes.add_node(num_cpus=1)
print(nodes.address, flush=True)
input()
nodes.shutdown()
"""


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of three nodes: the first one, which the command joins, has no processors."""
    command = [sys.executable, "-c", _CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdout is not None
        yield next(line.strip() for line in nodes.stdout if re.fullmatch(r"[\d.]+:\d+\n", line))
        nodes.communicate("\n", timeout=60)


def test_a_cluster_of_several_nodes(
    start: Start, ray_log: tuple[object, ...], tmp_path: Path, local: tuple[bytes, dict], cluster: str
) -> None:
    with start(*ray_log[:-2], "--ray-address", cluster) as process:
        assert_same(process, tmp_path, local)
    with start(*ray_log[:-2], "--overwrite", "--ray-address", cluster, "--threads", 2) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "no machine of the cluster has 2 processors" in said
