from __future__ import annotations

import pytest

from bidmatch.base.errors import ConfigError
from trainer.compare.items import parse_items


def test_rows_as_a_person_writes_them(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: bag\ndim: 32\n", encoding="utf-8")
    items = parse_items(
        [
            "unidec, ngame:epochs=3;dim=16",
            f"random=unidec:batch.cluster_size=1,{mine},short={mine}:epochs=1",
            "wider=inception:encoder.widths=[1,2,3,4];dim=128",
        ],
        "bag",
        ["epochs=5"],
    )
    assert [item.name for item in items] == [
        "unidec",
        "ngame:epochs=3;dim=16",
        "random",
        "mine",
        "short",
        "wider",
    ]
    assert [item.config.epochs for item in items] == [5, 3, 5, 5, 1, 5]
    assert items[0].config.encoder.kind == "bag"
    assert items[1].config.loss.dual_encoder == "triplet"
    assert items[2].config.batch.cluster_size == 1
    assert items[3].config.dim == 32
    assert items[5].config.encoder.widths == (1, 2, 3, 4)
    assert all("/" not in item.folder and ":" not in item.folder for item in items)
    assert len({item.folder for item in items}) == len(items)


def test_the_longest_names_are_folders(tmp_path):
    for item in parse_items(["x" * 120 + "=unidec," + "漢" * 80 + "=unidec"], "bag", []):
        (tmp_path / item.folder).mkdir()


def test_a_row_may_have_a_base_of_its_own():
    first, second = parse_items(["gandalf", "on inception=gandalf:base=inception"], "bag", [])
    assert (first.config.encoder.kind, second.config.encoder.kind) == ("bag", "inception")
    assert first.config.gandalf.enabled
    assert second.config.gandalf.enabled


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["unidec,unidec"], "2 rows are called unidec"),
        (["a b=bag", "a b=unidec"], "2 rows are called a b"),
        (["a;b=bag,a?b=bag"], "share the folder"),
        (["unidek"], "unidek"),
        (["unidec:dimm=3"], "dimm"),
        (["unidec:epochs"], "key=value"),
        (["unidec,,ngame"], "names no preset"),
        (["=unidec"], "cannot name a row"),
        (["../up=unidec"], "cannot name a row"),
        (["a$b=unidec"], "cannot name a row"),
        (["compare.json=unidec"], "cannot name a row"),
        (["x" * 200 + "=unidec"], "cannot name a row"),
        (["漢" * 120 + "=unidec"], "at most 120 characters and 240 bytes"),
        (["漢" * 81 + "=unidec"], "at most 120 characters and 240 bytes"),
        (["a\udce9=unidec"], "cannot name a row"),
        (["unidec:seed=3"], "seed"),
        (["unidec,other=unidec:propensity_a=0.6"], "propensities"),
    ],
)
def test_what_cannot_be_a_row_says_why(texts, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_items(texts, None, [])
