from __future__ import annotations

import math

import pytest

from bidmatch.base.errors import ConfigError
from trainer.config import TrainConfig, make_config, preset_names, validate_config


@pytest.mark.parametrize("name", preset_names())
def test_shipped_presets_are_valid_and_survive_their_own_dump(name):
    config = make_config(name, [])
    assert validate_config(config.model_dump(), name) == config


def test_the_presets_that_commands_name_are_shipped():
    assert {"bag", "unidec"} <= set(preset_names())


def test_values_are_read_as_a_person_means_them():
    config = make_config(
        "bag",
        [
            "optimiser.encoder_lr=1e-4",
            "optimiser.table_lr = 2",
            "loss.temperature=.07",
            "loss.normalise_classifier=false",
            "batch.hard_negatives=0",
            "encoder.pretrained=some/path",
            "seed=3",
        ],
    )
    assert config.optimiser.encoder_lr == 1e-4
    assert config.optimiser.table_lr == 2.0
    assert config.loss.temperature == 0.07
    assert config.loss.normalise_classifier is False
    assert config.batch.hard_negatives == 0
    assert config.encoder.pretrained == "some/path"
    assert config.seed == 3


def test_a_change_leaves_the_rest_of_its_section():
    changed = make_config("bag", ["optimiser.warmup=0.2"])
    assert changed.optimiser.model_copy(update={"warmup": make_config("bag", []).optimiser.warmup}) == (
        make_config("bag", []).optimiser
    )
    assert changed.optimiser.warmup == 0.2


def test_the_last_of_two_assignments_holds():
    assert make_config("bag", ["dim=128", "dim=512"]).dim == 512


def test_the_encoder_can_be_exchanged():
    config = make_config("bag", ["encoder.kind=transformer", "encoder.frozen_layers=4"])
    assert config.encoder.kind == "transformer"
    assert config.encoder.frozen_layers == 4


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("dimm=64", "dimm"),
        ("loss.temprature=1", "loss.temprature"),
        ("dim=63", "dim"),
        ("dim=0", "dim"),
        ("dim=wide", "dim"),
        ("dim=[64, 32]", "dim"),
        ("epochs=0", "epochs"),
        ("epochs=2.5", "epochs"),
        ("epochs=", "epochs"),
        ("optimiser.encoder_lr=-1", "optimiser.encoder_lr"),
        ("optimiser.encoder_lr=nan", "optimiser.encoder_lr"),
        ("optimiser.encoder_lr=inf", "optimiser.encoder_lr"),
        ("loss.temperature=0", "loss.temperature"),
        ("loss.weight=1.5", "loss.weight"),
        ("loss.dual_encoder=triplett", "loss.dual_encoder"),
        ("loss=supcon", "loss"),
        ("encoder.kind=lstm", "encoder"),
        ("encoder.frozen_layers=2", "encoder.frozen_layers"),
        ("encoder=bag", "encoder"),
        ("batch.queries=1", "batch.queries"),
        ("device=tpu", "device"),
        ("validation_share=1", "validation_share"),
        ("seed=-1", "seed"),
        ("dim", "dim"),
        ("=64", "=64"),
        ("dim={", "dim={"),
        ("dim.half=3", "dim"),
    ],
)
def test_a_wrong_assignment_names_its_field(assignment, named):
    with pytest.raises(ConfigError) as caught:
        make_config("bag", [assignment])
    assert named in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_every_wrong_field_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        make_config("bag", ["epochs=0", "batch.queries=0"])
    assert "epochs" in str(caught.value)
    assert "batch.queries" in str(caught.value)


def test_an_odd_width_says_why():
    with pytest.raises(ConfigError, match="even"):
        make_config("bag", ["dim=65"])


def test_a_preset_may_be_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("dim: 128\nloss:\n  auxiliary_bce: 0.5\n", encoding="utf-8")
    config = make_config(str(file), ["loss.weight=0.75"])
    assert (config.dim, config.loss.auxiliary_bce, config.loss.weight) == (128, 0.5, 0.75)
    assert config.optimiser == TrainConfig().optimiser
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    assert make_config(str(tmp_path / "empty.yaml"), []) == TrainConfig()


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text", "dim: [", "dim: 64\n  epochs: 3\n"])
def test_a_preset_file_that_is_none(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        make_config(str(file), [])


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(ConfigError) as caught:
        make_config("unidek", [])
    assert all(name in str(caught.value) for name in preset_names())


def test_a_configuration_cannot_change_under_a_run():
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().dim = 3  # type: ignore[misc]


def test_the_defaults_are_finite_and_consistent():
    config = TrainConfig()
    assert config.dim == 64
    assert math.isfinite(config.optimiser.table_lr)
