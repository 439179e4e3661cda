"""`bidmatch train` from a log to a run folder that export and eval can read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
import yaml

from bidmatch.base.errors import ConfigError, InputError
from bidmatch.base.text import key
from trainer.checkpoint import checkpoints, load_run
from trainer.config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset
from trainer.embed import evaluating
from trainer.run import run_training
from trainer.settings import make_config

CHANCE = 100 / 80
# Drawing the curves of validation metrics takes longer than these runs themselves.
UNVALIDATED = {"validation_share": 0}


@pytest.fixture(scope="module")
def finished(train_command, small_settings, tmp_path_factory):
    run = tmp_path_factory.mktemp("train") / "run"
    command = train_command(run, small_settings, "--json", "--test-share", "0.2")
    done = command.run()
    assert done.returncode == 0, done.stderr
    return run, command, done


def test_the_loss_falls_and_the_match_is_learnt(finished):
    _, _, done = finished
    report = json.loads(done.stdout)
    losses = [record["loss"]["total"] for record in report["history"]]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    for part in ("validation", "test"):
        for view in ("dual_encoder", "classifier", "concatenation"):
            metrics = report[part]["metrics"][view]
            assert metrics["P@1"] > 20 * CHANCE, (part, view)
            assert metrics["recall@10"] > 50
    assert report["test"]["queries"] > 40


def test_what_is_said_aloud(finished):
    _, _, done = finished
    assert "held out" in done.stderr
    assert "configuration:" in done.stderr
    assert "epoch 4/4: loss" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_run_folder(finished):
    run, _, done = finished
    report = json.loads(done.stdout)
    assert orjson.loads((run / "report.json").read_bytes()) == report
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == report["history"]
    config = TrainConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    assert config.model_dump(mode="json") == report["config"]
    info = orjson.loads((run / "run.json").read_bytes())
    assert info["split"]["share"] == 0.2
    assert info["counts"]["phrases"] == 80
    assert sum(info["counts"][f"{part}_queries"] for part in ("train", "validation", "test")) == 320
    html = (run / "report.html").read_text(encoding="utf-8")
    assert html.count("<svg") >= 5
    assert f"{report['test']['metrics']['concatenation']['P@1']:.1f}" in html
    # It is read offline, and years later: nothing is fetched.
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", html.replace("xlink:href", ""))
    assert "<script" not in html


def test_the_parts_are_disjoint_and_complete(finished, click_log):
    run, _, _ = finished
    trained = load_run(run)
    parts = {
        name: set(pa.ipc.open_file(str(run / "data" / f"{name}.arrow")).read_all()["query"].to_pylist())
        for name in ("train", "validation", "test")
    }
    assert not parts["train"] & (parts["validation"] | parts["test"])
    assert not parts["validation"] & parts["test"]
    dataset = read_dataset([click_log], ReadOptions(test_share=0.2))
    assert parts["test"] == set(dataset.test.queries.to_pylist())
    assert parts["train"] | parts["validation"] == set(dataset.train.queries.to_pylist())
    counts = trained.phrases["train_clicks"].to_numpy()
    train = pa.ipc.open_file(str(run / "data" / "train.arrow")).read_all()
    labels = np.concatenate([np.asarray(row) for row in train["labels"].to_pylist()])
    assert np.array_equal(counts, np.bincount(labels, minlength=80))


def test_a_loaded_run_ranks_as_it_reported(finished):
    import torch

    run, _, done = finished
    trained = load_run(run)
    assert trained.model_id == json.loads(done.stdout)["model_id"]
    assert trained.table.shape == (80, 8)

    def tokens(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = [encoding.ids for encoding in trained.tokenizer.encode_batch(texts)]
        width = max(map(len, encoded))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in encoded])
        return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in encoded])

    with evaluating(trained.model):
        (queries,) = trained.model.query_vectors(*tokens(trained.test.queries.to_pylist()))
        ((phi_d, _),) = trained.model(*tokens([key(text) for text in trained.phrases["text"].to_pylist()]))
    psi = torch.nn.functional.normalize(torch.from_numpy(trained.table), dim=1)
    scores = queries @ torch.cat([phi_d, psi], dim=1).T
    best = np.array(scores.argmax(1).tolist())
    hits = np.asarray(trained.test.clicks[np.arange(len(best)), best]).ravel() > 0
    reported = json.loads(done.stdout)["test"]["metrics"]["concatenation"]["P@1"]
    assert 100 * hits.mean() == pytest.approx(reported, abs=1e-4)


def test_again_says_finished_and_changes_no_weight(finished):
    run, command, done = finished
    final = checkpoints(run)[-1]
    before = {file.name: file.stat().st_mtime_ns for file in final.iterdir()}
    again = command.run()
    assert again.returncode == 0
    assert "finished already" in again.stderr
    assert {file.name: file.stat().st_mtime_ns for file in final.iterdir()} == before
    assert json.loads(again.stdout) == json.loads(done.stdout)


def test_other_settings_are_refused_by_name(finished, train_command, small_settings):
    run, _, _ = finished
    other = train_command(run, small_settings | {"epochs": 9}, "--test-share", "0.2").run()
    assert other.returncode == ConfigError.exit_code
    assert "epochs (4 there, 9 here)" in other.stderr
    nested = train_command(run, small_settings | {"loss.dual_encoder": "pal"}, "--test-share", "0.2").run()
    assert "other settings: loss.dual_encoder (supcon there, pal here)" in nested.stderr


def test_other_data_is_refused(finished, train_command, small_settings, click_log, tmp_path):
    run, _, _ = finished
    longer = tmp_path / "longer.tsv"
    longer.write_text(click_log.read_text(encoding="utf-8") + "one more query\tred garden hose\t1\n")
    other = train_command(run, small_settings, "--test-share", "0.2", data=longer).run()
    assert other.returncode == ConfigError.exit_code
    assert "other data" in other.stderr
    split = train_command(run, small_settings, "--test-share", "0.3").run()
    assert split.returncode == ConfigError.exit_code


def test_overwrite_spares_a_folder_that_is_no_run(train_command, small_settings, tmp_path):
    precious = tmp_path / "documents"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    refused = train_command(precious, small_settings, "--overwrite").run()
    assert refused.returncode == 2
    assert "holds files of something else" in refused.stderr
    assert (precious / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    "change",
    [{"optimiser.encoder_lr": 1e20, "optimiser.heads_lr": 1e20}, {"loss.temperature": 1e-320}],
    ids=["rates", "temperature"],
)
def test_a_run_that_does_not_converge_is_never_finished(train_command, small_settings, tmp_path, change):
    lost = train_command(tmp_path / "run", small_settings | change).run()
    assert lost.returncode == 1
    assert "training does not converge" in lost.stderr
    assert "optimiser.encoder_lr" in lost.stderr
    assert "Traceback" not in lost.stderr
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["query\tphrase", "red shoes\tshoes"], "too little"),
        (["query\tphrase", "red shoes\tshoes", "blue shoes\tshoes", "more shoes\tshoes"], "too little"),
        ([], None),
    ],
    ids=["one query", "one phrase", "empty file"],
)
def test_too_little_data(train_command, small_settings, tmp_path, lines, reason):
    file = tmp_path / "few.tsv"
    file.write_text("\n".join(lines) + ("\n" if lines else ""))
    refused = train_command(tmp_path / "run", small_settings, data=file).run()
    assert refused.returncode == InputError.exit_code
    assert reason is None or reason in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists()


def dataset_of(click_log: Path) -> Dataset:
    return read_dataset([click_log], ReadOptions(test_share=0.2))


VARIANTS = {
    "decoupled": ["loss.dual_encoder=decoupled", "loss.classifier=decoupled"],
    "with bce": ["loss.auxiliary_bce=0.5", "loss.classifier_temperature=0.2"],
    "classifier not normalised": ["loss.normalise_classifier=false", "loss.classifier_temperature=1"],
    "clustered batches": ["batch.cluster_size=32"],
    "no hard negatives": ["batch.hard_negatives=0"],
    "one positive, many negatives": ["batch.positives=1", "batch.hard_negatives=20"],
    "approximate mining": ["batch.exact_mining_up_to=10"],
    "table from noise": ["table_from_text=false"],
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_learn(click_log, small_settings, tmp_path, changes):
    settings = [f"{name}={value}" for name, value in (small_settings | UNVALIDATED).items()]
    report = run_training(dataset_of(click_log), make_config("bag", [*settings, *changes]), tmp_path / "run")
    losses = [record["loss"]["total"] for record in report["history"]]
    assert losses[-1] < 0.8 * losses[0]
    for view in ("dual_encoder", "concatenation"):
        assert report["test"]["metrics"][view]["P@1"] > 20 * CHANCE


def test_equal_seeds_give_equal_weights_and_others_do_not(click_log, small_settings, tmp_path):
    settings = [f"{name}={value}" for name, value in (small_settings | UNVALIDATED).items()]
    ids = [
        run_training(
            dataset_of(click_log),
            make_config("bag", [*settings, "epochs=1", f"seed={seed}"]),
            tmp_path / name,
        )["model_id"]
        for name, seed in (("first", 1), ("second", 1), ("third", 2))
    ]
    assert ids[0] == ids[1] != ids[2]


def test_nothing_held_out(click_log, small_settings, tmp_path):
    settings = [f"{name}={value}" for name, value in small_settings.items()]
    config = make_config("bag", [*settings, "epochs=1", "validation_share=0"])
    report = run_training(read_dataset([click_log], ReadOptions(test_share=0)), config, tmp_path / "run")
    assert report["validation"] is None
    assert report["test"] is None
    assert (tmp_path / "run" / "report.html").is_file()
    assert len(load_run(tmp_path / "run").validation) == 0


def test_a_run_that_is_not_finished_is_not_loaded(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint"):
        load_run(tmp_path)
