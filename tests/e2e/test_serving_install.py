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

# What training needs, and what the extras `client` and `traces` bring.
BLOCKED = {"torch", "transformers", "sklearn", "onnx", "onnxscript", "jinja2", "safetensors"} | TRAIN_PACKAGES
BLOCKED |= {"hnswlib", "httpx", "opentelemetry.sdk", "opentelemetry.exporter"}

# Python imports a module of this name as it starts.
SITECUSTOMIZE = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in BLOCKED):
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


def test_serve(environment: dict[str, str], small_bundle: Path, tmp_path: Path) -> None:
    """Workers, live phrases and a swap included."""
    options = ["--bundle", small_bundle, "--port", 0, "--workers", 2, "--live", tmp_path / "live"]
    command = [sys.executable, "-m", "bidmatch", "serve", *map(str, options)]
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
            address = line.split()[1]

            def ask(path: str, body: object = None) -> dict:
                content = None if body is None else json.dumps(body).encode()
                request = urllib.request.Request(
                    f"{address}{path}", content, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)

            (phrase, *_) = ask("/match?q=red+garden+hose")["matches"]
            put = ask("/phrases", {"phrases": [{"id": "new", "text": "solar garden gnome"}]})
            report = ask("/admin/reload", {"bundle": str(small_bundle)})
            (live, *_) = ask("/match", {"query": "solar garden gnome"})["matches"]
            why = ask("/admin/explain", {"query": "solar garden gnome"})
        finally:
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
    assert (phrase["phrase"], phrase["source"]) == ("red garden hose", "exact")
    assert put["phrases"][0]["state"] == "active"
    assert (report["phrases"], report["live_phrases"]) == (54, 1)
    assert (live["id"], live["source"]) == ("new", "exact")
    assert why["candidates"][0]["id"] == "new"


def test_traces_say_what_is_missing(run: Run, small_bundle: Path) -> None:
    done = run("serve", "--bundle", small_bundle, "--port", 0, "--traces")
    assert done.returncode == 5, done.stderr
    assert "traces need the package opentelemetry" in done.stderr
    assert "pip install '.[traces]'" in done.stderr


def test_the_client_says_what_is_missing(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import bidmatch.client"], capture_output=True, text=True, env=environment
    )
    assert done.returncode != 0
    assert "pip install httpx" in done.stderr or "No module named 'httpx'" in done.stderr


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
    assert "which is not installed\n  Install the training extra: pip install '.[train]'" in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["log.tsv"]
