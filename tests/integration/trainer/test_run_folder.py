"""What `bidmatch train` does with a folder that is not simply empty."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from bidmatch import cli
from bidmatch.base.errors import DamagedError
from trainer.checkpoint import load_run

SETTINGS = ["epochs=1", "dim=8", "threads=1", "batch.queries=16", "validation_share=0.2"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("log") / "log.tsv"
    words = ["red", "blue", "green", "small", "large"]
    things = ["shoes", "hat", "lamp", "chair"]
    rows = [f"{word} {thing} {n}\t{word} {thing}" for word in words for thing in things for n in range(3)]
    file.write_text("query\tphrase\n" + "\n".join(rows) + "\n")
    return file


def train(monkeypatch: pytest.MonkeyPatch, log: Path, out: Path, *more: str) -> int:
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = ["bidmatch", "train", "--data", str(log), "--out", str(out), "--preset", "bag", *sets, *more]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
        raise SystemExit(0)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_another_projects_folder_is_left_alone(monkeypatch, capsys, log, tmp_path, overwrite):
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "config.yaml").write_text("a: 1\n")
    (project / "data" / "precious.txt").write_text("gold")
    assert train(monkeypatch, log, project, *overwrite) == 2
    assert "something else" in capsys.readouterr().err
    assert (project / "config.yaml").read_text() == "a: 1\n"
    assert (project / "data" / "precious.txt").read_text() == "gold"
    assert sorted(entry.name for entry in project.iterdir()) == ["config.yaml", "data"]


def test_a_run_that_cannot_start_claims_and_deletes_nothing(monkeypatch, capsys, log, tmp_path):
    run = tmp_path / "run"
    broken = ["--set", "encoder.pretrained=" + str(tmp_path / "nowhere")]
    assert train(monkeypatch, log, run, *broken) == 2
    assert train(monkeypatch, log, run) == 0
    model_id = load_run(run).model_id
    assert train(monkeypatch, log, run, "--overwrite", *broken) == 2
    assert load_run(run).model_id == model_id
    assert train(monkeypatch, log, run, "--set", "seed=1") == 2
    assert "seed (0 there, 1 here)" in capsys.readouterr().err
    assert train(monkeypatch, log, run, "--overwrite", "--set", "seed=1") == 0
    assert load_run(run).model_id != model_id


def test_altered_data_is_not_exported(monkeypatch, log, tmp_path):
    run = tmp_path / "run"
    assert train(monkeypatch, log, run) == 0
    phrases = run / "data" / "phrases.arrow"
    whole = phrases.read_bytes()
    phrases.write_bytes(whole.replace(b"red", b"bed", 1))
    with pytest.raises(DamagedError, match=r"phrases\.arrow is missing or altered"):
        load_run(run)
    phrases.write_bytes(whole)
    load_run(run)
    (run / "run.json").write_bytes(orjson.dumps({}))
    with pytest.raises(DamagedError, match=r"run\.json is missing or damaged"):
        load_run(run)


def test_a_report_that_is_not_whole_is_made_again_from_the_checkpoint(monkeypatch, capsys, log, tmp_path):
    run = tmp_path / "run"
    assert train(monkeypatch, log, run) == 0
    whole = orjson.loads((run / "report.json").read_bytes())
    broken = [
        None,
        b"",
        (run / "report.json").read_bytes()[:500],
        b"[]",
        b'{"model_id":"x","test":null}',
        orjson.dumps(whole | {"model_id": "0123456789abcdef"}),
    ]
    capsys.readouterr()
    for content in broken:
        if content is None:
            (run / "report.json").unlink()
        else:
            (run / "report.json").write_bytes(content)
        assert train(monkeypatch, log, run) == 0, content
        assert "its report is made again" in capsys.readouterr().err
        assert orjson.loads((run / "report.json").read_bytes()) == whole, content
    for name in ("metrics.jsonl", "report.html"):
        (run / name).unlink()
        assert train(monkeypatch, log, run) == 0
        assert (run / name).is_file()
    capsys.readouterr()
    assert train(monkeypatch, log, run) == 0
    assert "made again" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["table", "mhc", "mhs"])
def test_settings_at_their_bounds_train(monkeypatch, log, tmp_path, kind):
    """What is allowed must not fail late: these cost by the data, not by their own size."""
    groups = {"table": [], "mhc": ["top_groups"], "mhs": ["sampled_groups"]}[kind]
    settings = {
        "heads": "both",
        "classifier.kind": kind,
        **{f"classifier.{name}": 10**9 for name in groups},
        **({} if kind == "table" else {"classifier.most_labels": 10**9}),
        "batch.queries": 10**6,
        "batch.positives": 10**6,
        "batch.extra_positives": 10**6,
        "batch.hard_negatives": 10**4,
        "batch.refresh": 10**4,
        "batch.chunk": 10**6,
        "batch.exact_mining_up_to": 10**9,
        "gandalf.enabled": "true",
        "gandalf.graph": "random_walk",
        "gandalf.walk_length": 10**5,
        "gandalf.most": 10**9,
        "validation_max": 10**9,
        "optimiser.max_grad_norm": 10**9,
        "keep_checkpoints": 10**5,
        "checkpoint_seconds": 10**9,
        "propensity_a": 10,
        "propensity_b": 10**6,
    }
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    assert train(monkeypatch, log, tmp_path / "run", *sets) == 0
    assert orjson.loads((tmp_path / "run" / "report.json").read_bytes())["test"]["metrics"]


@pytest.mark.parametrize(
    "setting",
    [
        "batch.positives=1e20",
        "keep_checkpoints=99999999999999999999999",
        "propensity_a=1e300",
        "gandalf.walk_length=999999999999",
        "epochs=1e18",
    ],
)
def test_settings_beyond_their_bounds_are_refused_by_name(monkeypatch, capsys, log, tmp_path, setting):
    assert train(monkeypatch, log, tmp_path / "run", "--set", setting) == 2
    assert setting.partition("=")[0] + ":" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_lengths_beyond_the_labels_are_refused(monkeypatch, capsys, log, tmp_path):
    sets = ["--set", "classifier.kind=mhp", "--set", "classifier.lengths=[1000000000, 2]"]
    assert train(monkeypatch, log, tmp_path / "run", *sets) == 2
    assert "more than the 20 labels" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_bounds_are_printed_with_the_presets(monkeypatch, capsys, log, tmp_path):
    assert train(monkeypatch, log, tmp_path / "run", "--list-presets") == 0
    assert "#   batch.positives: 1 to 1,000,000\n" in capsys.readouterr().out
