from __future__ import annotations

import math

import pytest

from bidmatch.base.errors import ConfigError
from trainer.config import TrainConfig
from trainer.settings import bounds_of, make_config, preset_names, validate_config


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


# "encoder.filters (inception)" -> the setting that chooses the kind, and the field.
NUMBERS = [
    (
        [f"{name.split('.')[0]}.kind={name.split('(')[1][:-1]}"] if "(" in name else [],
        name.split(" ")[0],
        bounds,
    )
    for name, bounds in bounds_of(TrainConfig)
]


RATES = ("optimiser.encoder_lr", "optimiser.heads_lr", "optimiser.table_lr")


@pytest.mark.parametrize(("kind", "field", "bounds"), NUMBERS)
@pytest.mark.parametrize(
    "large", ["1e20", "99999999999999999999999", "1e300", "-1e300", "9223372036854775807"]
)
def test_every_number_has_bounds(kind, field, bounds, large):
    value = f"[{large}]" if field in ("encoder.widths", "classifier.lengths") else large
    if (field, large) == ("seed", "9223372036854775807") or (
        field.endswith("_lr") and 0 < float(large) < 1e38
    ):
        return
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        make_config("bag", [*kind, f"{field}={value}"])
    assert " to " in bounds


def test_no_number_is_left_out_of_the_bounds():
    def numbers(values: dict, prefix: str = "") -> set[str]:
        found = set()
        for name, value in values.items():
            if isinstance(value, dict):
                found |= numbers(value, f"{prefix}{name}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found.add(prefix + name)
        return found

    for kind in ("mhp", "mhc", "mhs"):
        for encoder in ("bag", "inception", "transformer", "combined"):
            config = make_config("bag", [f"classifier.kind={kind}", f"encoder.kind={encoder}"])
            assert numbers(config.model_dump()) <= {field for _, field, _ in NUMBERS}


def test_bounds_leave_room_for_what_presets_ask():
    assert make_config("dexml", []).batch.positives == 100_000
    assert make_config("bag", ["batch.exact_mining_up_to=2000000"]).batch.exact_mining_up_to == 2_000_000


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("classifier.heads=3", "classifier.heads: .* classifier.kind=mhp; set that, too"),
        ("classifier.lengths=[8,8]", "classifier.lengths: .* classifier.kind=mhp; set that, too"),
        ("classifier.groups=3", r"classifier.groups: .* classifier.kind=mhc \(or mhs\); set that, too"),
        ("encoder.filters=64", "encoder.filters: .* encoder.kind=inception; set that, too"),
        ("encoder.filtres=64", "did you mean encoder.filters"),
        ("classifier.head=3", "did you mean classifier.heads"),
        ("encoder.kind=lstm", "encoder.kind: 'lstm' is none of bag, inception, transformer, combined"),
        ("classifier.kind=bag", "classifier.kind: 'bag' is none of table, mhp, mhc, mhs"),
    ],
)
def test_a_setting_of_another_kind_says_of_which(assignment, reason):
    with pytest.raises(ConfigError, match=reason):
        make_config("bag", [assignment])


def test_a_section_without_a_kind_has_the_default_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("encoder: {dropout: 0.1}\nclassifier: {}\n", encoding="utf-8")
    config = make_config(str(tmp_path / "mine.yaml"), [])
    assert (config.encoder.kind, config.encoder.dropout, config.classifier.kind) == ("bag", 0.1, "table")
    config = make_config("bag", ["classifier.kind=mhp", "classifier.heads=3"])
    assert (config.classifier.kind, config.classifier.heads) == ("mhp", 3)


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'dim: "\xe9"\n', "no UTF-8 text: byte 6 is 0xe9"),
        ("dim: 64\n".encode("utf-16"), "no UTF-8 text"),
        (b"dim: " + b"{" * 3000, "nests too deep"),
        (b"epochs: 2026-13-45\n", "month must be in"),
        (b"dim: 64\n\x00", "no valid YAML"),
        (b"dim: " + b"9" * 5000, "no valid YAML"),
    ],
    ids=["latin-1", "utf-16", "nested", "date", "nul", "digits"],
)
def test_a_preset_file_that_cannot_be_read_is_named(tmp_path, content, reason):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    for preset, base in ((str(file), None), ("bag", str(file)), ("unidec", str(file))):
        with pytest.raises(ConfigError, match=reason) as caught:
            make_config(preset, [], base)
        assert "bad.yaml" in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_preset(tmp_path):
    (tmp_path / "mine.yaml").write_text("dim: 32\n", encoding="utf-8-sig")
    assert make_config(str(tmp_path / "mine.yaml"), []).dim == 32


@pytest.mark.parametrize("value", ["{" * 3000, "2026-13-45", "9" * 5000], ids=["nested", "date", "digits"])
def test_a_value_that_is_no_yaml_is_refused(value):
    with pytest.raises(ConfigError, match="--set dim="):
        make_config("bag", [f"dim={value}"])


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".yaml"])
def test_a_preset_name_longer_than_a_files_is_none(name):
    with pytest.raises(ConfigError, match="there is no preset"):
        make_config(name, [])


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
