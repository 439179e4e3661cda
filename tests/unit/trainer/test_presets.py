"""Shipped presets: what each stands on, and what it leaves to that."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bidmatch.base.errors import ConfigError
from trainer.config import TrainConfig
from trainer.settings import PRESETS, make_config, preset_names

ENCODERS = {"bag", "combined", "distilbert", "inception", "minilm", "minilm-frozen"}
METHODS = sorted(set(preset_names()) - ENCODERS)


def written(name: str) -> dict:
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))


def test_encoder_presets_stand_on_nothing_and_methods_on_one_of_them():
    assert {name for name in preset_names() if "base" not in written(name)} == ENCODERS


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("encoder", ["bag", "minilm", "inception"])
def test_a_method_leaves_encoder_and_budget_to_what_it_stands_on(name, encoder):
    method, below = make_config(name, [], encoder), make_config(encoder, [])
    assert method.encoder == below.encoder
    assert method.optimiser == below.optimiser
    assert (method.epochs, method.dim, method.max_tokens) == (below.epochs, below.dim, below.max_tokens)
    assert method.batch.queries == below.batch.queries


@pytest.mark.parametrize("name", METHODS)
def test_no_setting_of_a_method_repeats_what_it_stands_on(name):
    own = written(name)
    below = make_config(own.pop("base"), []).model_dump(mode="json")
    if name == "unidec":  # says that its batches are clusters, which not every encoder preset's are
        below = make_config("bag", []).model_dump(mode="json")

    def repeated(values: dict, under: dict, prefix: str = "") -> list[str]:
        found = []
        for key, value in values.items():
            if isinstance(value, dict):
                found += repeated(value, under[key], f"{prefix}{key}.")
            elif value == under.get(key):
                found.append(prefix + key)
        return found

    assert repeated(own, below) == []


def test_methods_are_what_their_papers_say():
    def on_bag(name: str) -> TrainConfig:
        return make_config(name, [], "bag")

    whole = on_bag("unidec").batch.queries
    assert on_bag("unidec").batch.cluster_size == whole
    assert on_bag("bag").batch.cluster_size == 1
    for name in ("depsl", "ngame", "dpr", "ance", "simcse", "dexml"):
        assert on_bag(name).heads == "dual_encoder", name
    for name in ("unidec-clf", "renee"):
        assert on_bag(name).heads == "classifier", name
    for name in ("ngame", "dpr", "simcse", "renee"):
        assert on_bag(name).batch.hard_negatives == 0, name
    for name in ("dpr", "ance", "simcse", "dexml", "renee"):
        assert on_bag(name).batch.cluster_size == 1, name
    assert on_bag("ngame").batch.cluster_size == whole
    assert on_bag("ngame").loss.dual_encoder == "triplet"
    assert on_bag("ance").batch.hard_negatives > 0
    assert on_bag("renee").batch.all_labels
    assert on_bag("simcse").gandalf.alone
    assert [on_bag(f"mhe-{kind}").classifier.kind for kind in ("product", "cascade", "sampling")] == [
        "mhp",
        "mhc",
        "mhs",
    ]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_where_it_comes_from(name):
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    if name in METHODS and name != "wide":
        assert "section" in text or "table" in text or "abstract" in text


def test_the_default_on_a_gpu_trains_all_of_minilm_on_clustered_batches():
    config = make_config("unidec", [])
    assert (config.encoder.kind, config.encoder.pretrained) == ("transformer", "minilm-l6")
    assert config.encoder.frozen_layers == 0
    assert config.batch.cluster_size == config.batch.queries == 1024
    assert config.optimiser.encoder_lr == 3e-4


def test_clusters_follow_the_batch_unless_they_are_set():
    assert make_config("unidec", ["batch.queries=64"]).batch.cluster_size == 64
    assert make_config("unidec", ["batch.queries=64", "batch.cluster_size=8"]).batch.cluster_size == 8
    assert TrainConfig().batch.cluster_size == TrainConfig().batch.queries


def test_another_base_can_be_a_setting():
    assert make_config("ngame", ["base=bag"]) == make_config("ngame", [], "bag")
    assert make_config("ngame", ["base=bag"], "inception") == make_config("ngame", [], "bag")


def test_beneath_an_encoder_preset_a_base_fills_what_it_leaves_open(tmp_path):
    (tmp_path / "low.yaml").write_text("dim: 32\nepochs: 3\n", encoding="utf-8")
    config = make_config("bag", [], str(tmp_path / "low.yaml"))
    assert (config.dim, config.epochs) == (32, make_config("bag", []).epochs)


def test_a_change_of_encoder_drops_what_the_new_one_has_not(tmp_path):
    (tmp_path / "low.yaml").write_text(
        "encoder: {kind: bag, word_dropout: 0.3, pretrained: some/path}\n", encoding="utf-8"
    )
    config = make_config("minilm", [], str(tmp_path / "low.yaml"))
    assert config.encoder.kind == "transformer"
    assert config.encoder.pretrained == "some/path"
    with pytest.raises(ConfigError, match="word_dropout"):
        make_config("minilm", ["encoder.word_dropout=0.3"])


def test_a_file_may_stand_on_a_file_beside_it(tmp_path, monkeypatch):
    (tmp_path / "low.yaml").write_text("base: bag\ndim: 32\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("base: low.yaml\nepochs: 7\n", encoding="utf-8")
    monkeypatch.chdir("/")
    config = make_config(str(tmp_path / "mine.yaml"), [])
    assert (config.dim, config.epochs, config.encoder.kind) == (32, 7, "bag")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("base: mine.yaml\n", "its own base"),
        ("base: 3\n", "name of a preset"),
        ("base: unidek\n", "unidek"),
    ],
)
def test_a_base_that_is_none(tmp_path: Path, text, reason):
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        make_config(str(file), [])
