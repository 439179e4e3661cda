"""`bidmatch demo` as a user runs it: every stage a real process, everything left in one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

ARGUMENTS = ["--phrases", "150", "--queries", "900", "--set", "epochs=2", "--set", "threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an earlier demo was cut off."""
    out = tmp_path_factory.mktemp("e2e") / "demo"
    (out / "run" / "checkpoints").mkdir(parents=True)
    (out / "bundle").mkdir()
    (out / "bundle" / "manifest.json").write_text("half of")
    (out / "demo.json").write_text("{}")
    return out


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bidmatch", "demo", "--out", str(folder), "--json", *ARGUMENTS],
        capture_output=True,
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def report(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return orjson.loads(done.stdout)


def test_everything_is_left_in_the_folder(report: dict, folder: Path):
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"demo.json", "log.tsv", "run", "bundle", "server.log", "report.json"}
    assert orjson.loads((folder / "report.json").read_bytes()) == report
    assert (folder / "run" / "report.html").is_file()
    assert (folder / "bundle" / "manifest.json").is_file()


def test_five_answers_came_over_http(report: dict, folder: Path):
    log = (folder / "log.tsv").read_text(encoding="utf-8").splitlines()[1:]
    phrases = {line.split("\t")[1] for line in log}
    queries = {line.split("\t")[0] for line in log}
    assert len(report["matches"]) == 5
    for call in report["matches"]:
        assert call["query"] in queries
        assert len(call["matches"]) == 5
        assert {match["phrase"] for match in call["matches"]} <= phrases
        for match in call["matches"]:
            assert match["score"] == pytest.approx(sum(match["parts"].values()), abs=1e-5)
            assert match["clicked"] == (match["phrase"] in call["clicked"])


def test_bundle_and_baselines_are_measured_on_the_same_queries(report: dict):
    assert set(report["metrics"]) == {"bidmatch", "tfidf", "nearest", "hybrid"}
    for values in report["metrics"].values():
        assert {"P@1", "PSP@5", "recall@10"} <= set(values)
        assert 0 < values["recall@10"] <= 100
    # Synonyms and model names, learnt from clicks, are what words alone lack.
    assert report["metrics"]["bidmatch"]["recall@10"] > report["metrics"]["tfidf"]["recall@10"]
    assert report["data"]["held_out_queries"] > 20
    assert report["data"]["simulated"] is True


def test_it_says_what_it_does(done: subprocess.CompletedProcess, report: dict):
    said = done.stderr.decode()
    for number, stage in enumerate(("simulate", "train", "export", "serve", "eval", "baselines"), start=1):
        assert f"[{number}/6] {stage}:" in said
        assert report["seconds"][stage] > 0
    assert "$ bidmatch train --data" in said
    assert "simulated" in said


def test_the_server_was_stopped_in_order(report: dict, folder: Path):
    assert "stopping" in (folder / "server.log").read_text(encoding="utf-8")


def test_the_run_is_measured_by_eval_as_its_own_report_has_it(report: dict, folder: Path):
    done = subprocess.run(
        [sys.executable, "-m", "bidmatch", "eval", "--checkpoint", str(folder / "run"), "--json"],
        capture_output=True,
        check=True,
    )
    measured = orjson.loads(done.stdout)
    trained = orjson.loads((folder / "run" / "report.json").read_bytes())["test"]["metrics"]
    assert set(measured["views"]) == set(trained)
    for view, quality in measured["views"].items():
        for name in ("P@1", "P@5", "recall@10"):
            assert quality["metrics"][name] == pytest.approx(trained[view][name], abs=0.5), view
    # The bundle searches approximately and may be quantised: near, not equal.
    assert measured["metrics"]["recall@10"] == pytest.approx(
        report["metrics"]["bidmatch"]["recall@10"], abs=5
    )


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = subprocess.run(
        [sys.executable, "-m", "bidmatch", "demo", "--out", str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"no demo has left" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
