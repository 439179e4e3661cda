"""The serving install: every command that needs no training works where its packages cannot be imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bidmatch.cli import COMMANDS, TRAIN_PACKAGES

BLOCKED = {"torch", "transformers", "sklearn", "onnx", "onnxscript", "jinja2", "safetensors"} | TRAIN_PACKAGES

# Python imports a module of this name as it starts.
SITECUSTOMIZE = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Absent())
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(f"BLOCKED = {sorted(BLOCKED)}\n{SITECUSTOMIZE}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BIDMATCH_")}
    places = [str(folder), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """`run("inspect", ...)` runs that command in an empty folder, without the packages of training."""

    def running(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bidmatch", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return running


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.tsv"
    path.write_text(
        "query\tphrase\tclicks\nbuy red garden hose\tred garden hose\t3\nhose red\tred garden hose\t1\n"
    )
    return path


def test_the_packages_cannot_be_imported(environment: dict[str, str]) -> None:
    for package in BLOCKED:
        done = subprocess.run(
            [sys.executable, "-c", f"import {package}"], capture_output=True, text=True, env=environment
        )
        assert f"No module named '{package}'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"bidmatch {command}" in done.stdout


def test_data(run: Run, log: Path, tmp_path: Path) -> None:
    done = run("data", log, "--write", "pairs.tsv")
    assert done.returncode == 0, done.stderr
    assert "red garden hose" in (tmp_path / "pairs.tsv").read_text()


def test_inspect(run: Run, small_bundle: Path) -> None:
    done = run("inspect", small_bundle, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"] is True


def test_score(run: Run, small_bundle: Path, log: Path, tmp_path: Path) -> None:
    done = run("score", "--bundle", small_bundle, "--input", log, "--output", "m.parquet", "-k", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["matches"] == 4
    assert pq.read_table(tmp_path / "m.parquet")["phrase"].to_pylist()[0] == "red garden hose"


def test_eval(run: Run, small_bundle: Path, log: Path) -> None:
    done = run("eval", "--bundle", small_bundle, "--data", log, "--all-queries", "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["queries"] == 2
    assert measured["metrics"]["recall@10"] == 100.0


def test_simulate(run: Run, tmp_path: Path) -> None:
    done = run("simulate", "--phrases", 100, "--queries", 400, "--out", "log.tsv")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "log.tsv").read_text().splitlines()) > 400


def test_serve(environment: dict[str, str], small_bundle: Path) -> None:
    command = [sys.executable, "-m", "bidmatch", "serve", "--bundle", str(small_bundle), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("ready: "):
                    break
            else:
                pytest.fail("".join(said))
            with urllib.request.urlopen(f"{line.split()[1]}/match?q=red+garden+hose", timeout=30) as answer:
                matches = json.load(answer)["matches"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
    assert matches[0]["phrase"] == "red garden hose"
    assert matches[0]["source"] == "exact"


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--data", "log.tsv", "--out", "run"),
        ("export", "--checkpoint", ".", "--out", "bundle"),
        ("eval", "--checkpoint", "."),
    ],
)
def test_training_says_what_is_missing(
    run: Run, log: Path, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = run(*arguments)
    assert done.returncode == 5, done.stderr
    assert (
        "which is not installed\n  Install the training extra: pip install 'bidmatch[train]'" in done.stderr
    )
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["log.tsv"]
