"""Examples, phrases and the table of changes, on answers by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bidmatch.base.errors import BidmatchError, ConfigError
from service.comparing.answers import Pair, pair
from service.comparing.changes import change_schema, change_table, check_output
from service.comparing.examples import TopExamples
from service.comparing.phrases import changes_of, top_changes
from service.scoring.writers import format_of, writer

from .conftest import answers

QUERIES = ["changed", "lost", "gained", "nothing", "same", "less changed", "lost, rare"]
COUNTS = np.array([5, 4, 3, 9, 9, 6, 1])


@pytest.fixture
def changed() -> Pair:
    a = answers([0, 0, 1, 4, 5, 5, 5, 6], "xyxzxyzu")
    b = answers([0, 0, 2, 2, 4, 5, 5, 5], "xwuvzxyw")
    return pair(a, b, len(QUERIES))


def test_examples(changed: Pair) -> None:
    found = TopExamples(changed, QUERIES, COUNTS, 0, 10).examples()
    assert [one.query for one in found.lost] == ["lost", "lost, rare"]
    assert [one.query for one in found.gained] == ["gained"]
    assert found.gained[0].gained == ["phrase u", "phrase v"]
    # 5 * 2/3 against 6 * 2/4.
    assert [one.query for one in found.changed] == ["changed", "less changed"]
    assert found.changed[0].model_dump() == {
        "query": "changed",
        "count": 5,
        "common": 1,
        "lost": ["phrase y"],
        "gained": ["phrase w"],
    }


def test_examples_of_parts_add_up_and_the_first_of_the_log_go_first() -> None:
    one = pair(answers([0, 1], "xx"), answers([], ""), 2)
    top = TopExamples(one, ["a", "b"], np.array([1, 2]), 2, 2)
    top.add(TopExamples(one, ["c", "d"], np.array([2, 1]), 0, 2))
    assert [example.query for example in top.examples().lost] == ["c", "b"]


def test_phrases_that_gain_and_lose(changed: Pair, tmp_path: Path) -> None:
    table = changes_of(changed, COUNTS)
    found = top_changes([table.slice(0, 2), table.slice(2)], tmp_path / "scratch", 2)
    # w: 5 + 6 gained. u: 3 gained, 1 lost. v: 3 gained. y: 5 lost, x: 4 lost, z: 6 lost.
    assert [one.model_dump() for one in found.gained] == [
        {"phrase": "phrase w", "gained": 11, "lost": 0, "change": 11},
        {"phrase": "phrase v", "gained": 3, "lost": 0, "change": 3},
    ]
    assert [(one.phrase, one.change) for one in found.lost] == [("phrase z", -6), ("phrase y", -5)]
    every = top_changes([table, table], tmp_path / "more", 10)
    assert ("phrase u", 6, 2, 4) in [(one.phrase, one.gained, one.lost, one.change) for one in every.gained]


def test_table_of_changes(changed: Pair, tmp_path: Path) -> None:
    queries = pa.record_batch({"query": pa.array(QUERIES, pa.large_string()), "count": COUNTS})
    rows = change_table(changed, queries, change_schema(format_of("jsonl"))).to_pylist()
    assert rows[0] == {
        "query": "changed",
        "count": 5,
        "matches_a": 2,
        "matches_b": 2,
        "common": 1,
        "same_first": True,
        "lost": ["phrase y"],
        "gained": ["phrase w"],
    }
    assert [row["same_first"] for row in rows] == [True, None, None, None, True, True, None]
    assert (rows[2]["lost"], rows[2]["gained"]) == ([], ["phrase u", "phrase v"])
    form = format_of("tsv")
    text = change_table(changed, queries, change_schema(form))
    with writer(tmp_path / "c.tsv", form, text.schema, {}) as write:
        write(text)
    with (tmp_path / "c.tsv").open(newline="") as stream:
        lines = list(csv.reader(stream, delimiter="\t"))
    assert lines[0] == text.column_names
    assert lines[3] == ["gained", "3", "0", "2", "0", "", "", "phrase u | phrase v"]
    assert lines[5][5] == "true"


def test_outputs_that_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.tsv"
    log.write_text("query\n")
    (tmp_path / "bundle").mkdir()
    for name, error in (
        ("log.tsv", ConfigError),
        ("changes.xlsx", ConfigError),
        ("bundle", ConfigError),
        ("bundle/c.tsv", BidmatchError),
    ):
        with pytest.raises(error):
            check_output(tmp_path / name, [log], [tmp_path / "bundle"], overwrite=True)
    (tmp_path / "c.tsv").touch()
    with pytest.raises(BidmatchError, match="already exists"):
        check_output(tmp_path / "c.tsv", [log], [], overwrite=False)
    assert check_output(tmp_path / "c.tsv", [log], [], overwrite=True).kind == "tsv"
