"""`bidmatch compare` on a small log, and a short run of every shipped preset."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bidmatch.base.errors import BidmatchError, ConfigError, InputError
from bidmatch.base.files import locked
from bidmatch.commands.compare import command
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset
from trainer.evaluate import served_view
from trainer.run import run_training
from trainer.settings import make_config, preset_names

# No validation: drawing its curves takes longer than these runs themselves.
QUICK = {"epochs": 2, "validation_share": 0}
SHARE = "0.2"


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_preset_trains(click_log, small_settings, tiny_encoders, tmp_path, name):
    """Methods on the bag encoder, encoder presets as themselves, all with tiny pretrained weights."""
    settings = small_settings | QUICK | {"optimiser.warmup": 0, "batch.exact_mining_up_to": 1000}
    if name == "distilbert":
        settings["encoder.pretrained"] = tiny_encoders.distilbert
    if name == "minilm-frozen":
        settings["encoder.frozen_layers"] = 1
    config = make_config(name, [f"{key}={value}" for key, value in settings.items()], "bag")
    dataset = read_dataset([click_log], ReadOptions(test_share=float(SHARE)))
    report = run_training(dataset, config, tmp_path / "run")
    losses = [record["loss"]["total"] for record in report["history"]]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    metrics = report["test"]["metrics"]
    chance = 10 / 80
    assert metrics[served_view(metrics)]["recall@10"] > 100 * chance


@pytest.fixture(scope="module")
def compare(click_log, small_settings) -> Callable[..., object]:
    """Runs the command in this process with further options; its result as click has it."""

    def run(out: Path, *options: str, data: Path = click_log) -> object:
        sets = [
            part for key, value in (small_settings | QUICK).items() for part in ("--set", f"{key}={value}")
        ]
        fixed = ["--data", str(data), "--out", str(out), "--test-share", SHARE, "--base", "bag", *sets]
        return CliRunner().invoke(command, [*fixed, *options])

    return run


@pytest.fixture(scope="module")
def finished(compare, click_log, tmp_path_factory):
    """A comparison of everything that can be a row, one of which is refused in training."""
    folder = tmp_path_factory.mktemp("compare")
    dataset = read_dataset([click_log], ReadOptions(test_share=float(SHARE)))
    truth = dataset.test.clicks
    perfect = np.full((truth.shape[0], 5), -1, dtype=np.int64)
    for query in range(truth.shape[0]):
        labels = truth[query].indices
        perfect[query, : len(labels)] = labels
    np.savez(folder / "perfect.npz", topk=perfect, seconds=12.0)
    options = [
        "--presets",
        "unidec,random=unidec:batch.cluster_size=1,depsl,renee:batch.all_labels_up_to=10",
        "--ranking",
        f"perfect={folder / 'perfect.npz'}",
        "--lexical",
        "--seeds",
        "2",
    ]
    out = folder / "out"
    result = compare(out, *options, "--json")
    return out, options, result


def rows_of(comparison: dict) -> dict[str, dict]:
    return {row["name"]: row for row in comparison["rows"]}


def test_all_rows_are_measured_alike(finished):
    out, _, result = finished
    found = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert json.loads(result.stdout) == found
    rows = rows_of(found)
    refused = "renee:batch.all_labels_up_to=10"
    assert list(rows) == ["unidec", "random", "depsl", refused, "perfect", "tfidf", "nearest", "hybrid"]
    assert set(rows["unidec"]["views"]) == {"dual_encoder", "classifier", "concatenation"}
    assert set(rows["depsl"]["views"]) == {"dual_encoder"}
    assert rows["perfect"]["views"]["ranking"]["all"]["recall@100"]["mean"] == 100.0
    assert rows["perfect"]["seconds"]["mean"] == 12.0
    assert rows["hybrid"]["views"]["ranking"]["all"]["P@1"]["mean"] > 20
    pairs = {
        sum(row["views"][row["served"]][part]["pairs"]["mean"] for part in ("head", "torso", "tail"))
        for row in rows.values()
        if row["served"]
    }
    assert pairs == {found["data"]["test_pairs"]}


def test_a_row_is_the_mean_of_its_runs(finished):
    out, _, _ = finished
    row = rows_of(json.loads((out / "compare.json").read_text(encoding="utf-8")))["unidec"]
    reports = [json.loads((out / run["folder"] / "report.json").read_text()) for run in row["runs"]]
    assert [report["config"]["seed"] for report in reports] == [0, 1]
    for view in ("dual_encoder", "concatenation"):
        values = [report["test"]["metrics"][view]["P@5"] for report in reports]
        found = row["views"][view]["all"]["P@5"]
        assert found["mean"] == pytest.approx(np.mean(values))
        assert found["sd"] == pytest.approx(np.std(values, ddof=1))
        assert found["n"] == 2
    assert row["seconds"]["mean"] > 0
    assert row["config"]["encoder"]["kind"] == "bag"


def test_a_run_that_fails_is_a_row_that_says_why(finished):
    out, _, result = finished
    assert isinstance(result.exception, BidmatchError)
    assert "2 of 8 runs failed" in str(result.exception)
    row = rows_of(json.loads((out / "compare.json").read_text(encoding="utf-8")))[
        "renee:batch.all_labels_up_to=10"
    ]
    assert row["served"] is None
    assert all("up to 10 labels" in run["error"] for run in row["runs"])
    assert "up to 10 labels" in (out / "compare.html").read_text(encoding="utf-8")


def test_again_takes_finished_runs_as_they_are(finished, compare):
    out, options, _ = finished
    before = {file: file.stat().st_mtime_ns for file in out.glob("*/seed-*/checkpoints/*/*")}
    assert len(before) >= 12
    old = rows_of(json.loads((out / "compare.json").read_text(encoding="utf-8")))
    result = compare(out, *options)
    assert {file: file.stat().st_mtime_ns for file in out.glob("*/seed-*/checkpoints/*/*")} == before
    new = rows_of(json.loads((out / "compare.json").read_text(encoding="utf-8")))
    assert [run["error"] for run in new["unidec"]["runs"]] == [None, None]
    assert new == old
    assert "unidec" in result.stdout
    assert "compare.html" in result.stdout


def tables_of(out: Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in ("compare.json", "compare.html")]


@pytest.mark.parametrize(
    ("presets", "options", "reason"),
    [
        ("unidec", ["--set", "epochs=3"], r"unidec/seed-0 holds .* epochs \(2 there, 3 here\)"),
        ("unidec,depsl", ["--set", "epochs=3"], "and 1 more of the run folders"),
        (
            "new=bag,depsl:epochs=3,depsl=unidec",
            [],
            r"depsl/seed-0 holds .* heads \(dual_encoder there, both",
        ),
        ("unidec", ["--test-share", "0.3"], "on other data"),
        ("new=bag", ["--test-share", "0.3"], "compare.json is a comparison on other data"),
    ],
)
def test_another_comparison_is_refused_and_the_table_stays(finished, compare, presets, options, reason):
    out, _, _ = finished
    before, folders = tables_of(out), sorted(out.iterdir())
    result = compare(out, "--presets", presets, "--seeds", "1", *options)
    assert isinstance(result.exception, ConfigError)
    assert re.search(reason, result.exception.reason), result.exception
    assert "--overwrite" in result.exception.hint
    assert tables_of(out) == before
    assert sorted(out.iterdir()) == folders


def test_a_folder_of_something_else_in_a_rows_place_is_refused(finished, compare):
    out, _, _ = finished
    before = tables_of(out)
    (out / "mine" / "seed-0").mkdir(parents=True)
    (out / "mine" / "seed-0" / "thesis.txt").write_text("years of work")
    result = compare(out, "--presets", "unidec,mine=bag", "--seeds", "1")
    shutil.rmtree(out / "mine")
    assert isinstance(result.exception, ConfigError)
    assert "something else" in str(result.exception)
    assert tables_of(out) == before


def test_two_comparisons_do_not_share_a_folder(finished, compare):
    out, _, _ = finished
    before = tables_of(out)
    with locked(out / ".lock", "held by this test"):
        result = compare(out, "--presets", "unidec", "--seeds", "1")
    assert "another comparison is being made" in str(result.exception)
    assert tables_of(out) == before


def test_a_kill_costs_no_finished_row(finished, compare, tmp_path, monkeypatch):
    out, _, _ = finished
    shutil.copytree(out, tmp_path / "out")
    old = rows_of(json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8")))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.compare.rows.run_training", killed)
    compare(tmp_path / "out", "--presets", "new=unidec,unidec,depsl", "--seeds", "2")
    rows = rows_of(json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8")))
    assert rows == {name: old[name] for name in ("unidec", "depsl")}


def test_a_run_that_the_disk_stops_is_a_row_that_says_why(compare, tmp_path, monkeypatch):
    """A folder's name may be too long where the file system allows less than most do."""
    real = Path.mkdir

    def refusing(self: Path, *options: object, **named: object) -> None:
        if self.name == "seed-0" and self.parent.name == "long":
            raise OSError(errno.ENAMETOOLONG, "File name too long", str(self))
        real(self, *options, **named)

    monkeypatch.setattr(Path, "mkdir", refusing)
    result = compare(tmp_path / "out", "--presets", "long=unidec,depsl", "--seeds", "1")
    assert isinstance(result.exception, BidmatchError)
    rows = rows_of(json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8")))
    assert "File name too long" in rows["long"]["runs"][0]["error"]
    assert rows["depsl"]["served"] == "dual_encoder"


def test_rankings_alone_need_no_training(finished, compare, tmp_path):
    out, _, _ = finished
    result = compare(tmp_path / "out", "--ranking", f"perfect={out.parent / 'perfect.npz'}", "--lexical")
    assert result.exception is None, result.exception
    found = json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))
    assert found["seeds"] == []
    assert len(found["rows"]) == 4
    cut = compare(tmp_path / "cut", "--ranking", f"perfect={out.parent / 'perfect.npz'}", "--depth", "1")
    assert cut.exception is None
    figures = json.loads((tmp_path / "cut" / "compare.json").read_text())["rows"][0]["views"]["ranking"][
        "all"
    ]
    assert figures["P@1"]["mean"] == 100.0
    assert math.isclose(figures["P@5"]["mean"], 20.0)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ([], ConfigError, "nothing to compare"),
        (["--presets", "unidec", "--ranking", "unidec=x.npz"], ConfigError, "2 rows are called unidec"),
        (["--presets", "tfidf=unidec", "--lexical"], ConfigError, "2 rows are called tfidf"),
        (["--ranking", "x.npz"], ConfigError, "NAME=FILE.npz"),
        (["--ranking", "x=missing.npz"], InputError, "missing.npz"),
        (["--ranking", "x={file}.npy"], InputError, "a single array (.npy), not an .npz file"),
        (["--ranking", "x={file}.npz"], InputError, "`seconds` is int64 (2,), not one number"),
        (["--presets", "unidec,unidek"], ConfigError, "unidek"),
        (["--presets", "depsl", "--base", "ngame"], ConfigError, "base=ngame: it is a method"),
        (["--presets", "unidec", "--test-share", "0"], ConfigError, "held out"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(compare, tmp_path, options, error, reason):
    file = tmp_path / "given"
    np.save(f"{file}.npy", np.zeros((2, 2), dtype=np.int64))
    np.savez(f"{file}.npz", topk=np.zeros((2, 2), dtype=np.int64), seconds=np.array([1, 2]))
    result = compare(tmp_path / "out", *(option.format(file=file) for option in options))
    assert isinstance(result.exception, error)
    assert reason in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_several_processes_are_refused(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = compare(tmp_path / "out", "--presets", "unidec")
    assert isinstance(result.exception, ConfigError)
    assert "Leave torchrun out" in str(result.exception.hint)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_spared(compare, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    result = compare(tmp_path, "--presets", "unidec")
    assert isinstance(result.exception, ConfigError)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_damaged_run_leaves_the_others(finished, compare, tmp_path):
    out, _, _ = finished
    shutil.copytree(out, tmp_path / "out")
    (weights,) = (tmp_path / "out" / "unidec" / "seed-0" / "checkpoints").glob("*-final/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    result = compare(tmp_path / "out", "--presets", "unidec,depsl", "--seeds", "1")
    assert isinstance(result.exception, BidmatchError)
    rows = rows_of(json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8")))
    assert "model.safetensors is missing or altered" in rows["unidec"]["runs"][0]["error"]
    assert rows["depsl"]["views"]["dual_encoder"]["all"]["P@1"]["n"] == 1
    anew = compare(tmp_path / "out", "--presets", "unidec,depsl", "--seeds", "1", "--overwrite")
    assert anew.exception is None, anew.exception
    rows = rows_of(json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8")))
    assert rows["unidec"]["runs"][0]["error"] is None


def test_a_report_that_is_not_whole_is_made_again(finished, compare, tmp_path):
    out, _, _ = finished
    shutil.copytree(out, tmp_path / "out")
    old = rows_of(json.loads((out / "compare.json").read_text(encoding="utf-8")))["unidec"]
    for seed, content in enumerate((b"{", b'{"model_id": "x", "test": null}')):
        (tmp_path / "out" / "unidec" / f"seed-{seed}" / "report.json").write_bytes(content)
    result = compare(tmp_path / "out", "--presets", "unidec", "--seeds", "2")
    assert result.exception is None, result.exception
    new = rows_of(json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8")))["unidec"]
    assert new["views"] == old["views"]
    # The memory that training took was measured then; making a report again takes less.
    assert new["peak_host_bytes"] == old["peak_host_bytes"]
