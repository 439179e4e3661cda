"""A data set with filter files: what a run keeps, learns from and reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from bidmatch import cli
from trainer.checkpoint import load_run, read_interactions, sha256_data
from trainer.data.read import read_dataset

WORDS = ["red", "blue", "green", "small", "large", "old"]
THINGS = ["shoes", "hat", "lamp", "chair"]
LABELS = [f"{word} {thing}" for word in WORDS for thing in THINGS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every query is a label's own text; right are the other words' labels of the same thing."""
    path = tmp_path_factory.mktemp("data")
    (path / "labels.txt").write_text("\n".join(LABELS) + "\n")
    held = range(0, len(LABELS), 5)
    train = [row for row in range(len(LABELS)) if row not in held]
    for name, side, rows in (("trn", "train", train), ("tst", "test", held)):
        lines, pairs = [], []
        for at, row in enumerate(rows):
            others = [other for other in range(row % 4, len(LABELS), 4) if other != row]
            lines.append(json.dumps({"query": LABELS[row], "labels": others}))
            pairs.append(f"{at} {row}")
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (path / f"filter_labels_{side}.txt").write_text("\n".join(pairs) + "\n")
    return path


def bidmatch(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bidmatch", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
        raise SystemExit(0)
    assert ended.value.code == 0


def trained(monkeypatch: pytest.MonkeyPatch, folder: Path, run: Path) -> dict:
    sets = ["epochs=2", "dim=16", "threads=1", "batch.queries=8", "validation_share=0.3", "device=cpu"]
    assignments = [part for one in sets for part in ("--set", one)]
    bidmatch(monkeypatch, "train", "--data", folder, "--out", run, "--preset", "bag", *assignments)
    return orjson.loads((run / "report.json").read_bytes())


@pytest.fixture
def run(monkeypatch, folder, tmp_path) -> Path:
    trained(monkeypatch, folder, tmp_path / "run")
    return tmp_path / "run"


def own_text_only(interactions) -> bool:
    pairs = interactions.filtered.tocoo()
    queries = interactions.queries.to_pylist()
    named = [(queries[row], LABELS[column]) for row, column in zip(pairs.row, pairs.col, strict=True)]
    return len(named) == len(queries) and all(query == label for query, label in named)


def test_the_run_folder_keeps_the_pairs_of_every_part(run):
    info = orjson.loads((run / "run.json").read_bytes())
    assert info["data"]["read"]["filter_pairs"] == {"train": 19, "test": 5}
    assert info["sha256"] == sha256_data(run)
    for name in ("train", "validation", "test"):
        part = read_interactions(run / "data" / f"{name}.arrow", len(LABELS))
        assert len(part) > 0
        assert own_text_only(part)
    assert own_text_only(load_run(run).test)


def test_no_query_is_answered_with_its_own_text(monkeypatch, capsys, run, folder, tmp_path):
    """A label equal to the query is nearest by text, so without the filter files it would take place 1."""
    report = orjson.loads((run / "report.json").read_bytes())
    views = report["test"]["metrics"]
    capsys.readouterr()
    bidmatch(monkeypatch, "eval", "--checkpoint", run, "--json")
    measured = json.loads(capsys.readouterr().out)
    assert measured["filter_pairs"] == 5
    for view, quality in measured["views"].items():
        assert quality["metrics"] == pytest.approx(views[view])
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("labels.txt", "trn.jsonl", "tst.jsonl"):
        (plain / name).write_bytes((folder / name).read_bytes())
    without = trained(monkeypatch, plain, tmp_path / "run without")["test"]["metrics"]
    assert without["dual_encoder"]["P@1"] == 0
    assert views["dual_encoder"]["P@1"] > 0


def test_a_bundle_is_measured_without_the_pairs(monkeypatch, capsys, run, folder, tmp_path):
    bundle = tmp_path / "bundle"
    bidmatch(monkeypatch, "export", "--checkpoint", run, "--out", bundle)
    manifest = orjson.loads((bundle / "manifest.json").read_bytes())
    views = orjson.loads((run / "report.json").read_bytes())["validation"]["metrics"]
    assert manifest["quality"]["exact"]["P@1"] == pytest.approx(views["concatenation"]["P@1"], abs=0.01)
    assert manifest["quality"]["exact"]["P@1"] > 0
    capsys.readouterr()
    bidmatch(monkeypatch, "eval", "--bundle", bundle, "--data", folder, "--depth", 20, "--json")
    measured = json.loads(capsys.readouterr().out)
    assert measured["filter_pairs"] == 5
    assert measured["trained_on_these_data"]
    # An exact text comes first in what is served; filtered, it takes no place.
    assert measured["metrics"]["P@1"] > 0
    assert measured["metrics"]["recall@100"] > 80


def test_the_filter_keeps_own_texts_out_of_hard_negatives(monkeypatch, folder, tmp_path):
    import trainer.loop

    plans = []
    make = trainer.loop.make_plan

    def watched(*arguments):
        plans.append(make(*arguments))
        return plans[-1]

    monkeypatch.setattr(trainer.loop, "make_plan", watched)
    trained(monkeypatch, folder, tmp_path / "run")
    part = read_interactions(tmp_path / "run" / "data" / "train.arrow", len(LABELS))
    assert read_dataset([folder]).report.fingerprint
    assert plans
    for plan in plans:
        assert (plan.hard >= 0).any()
        own = part.filtered.indices[:, None]
        assert not (plan.hard == own).any()
        assert not np.isin(plan.hard[0][plan.hard[0] >= 0], part.clicks[0].indices).any()
