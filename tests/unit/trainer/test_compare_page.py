"""The page and the JSON of a comparison, from figures made up."""

from __future__ import annotations

import math
import re
from pathlib import Path

import orjson
import pytest

from trainer.compare.items import parse_items
from trainer.compare.records import Comparison, Data, Run, Spread
from trainer.compare.rows import measured_row, trained_row
from trainer.compare.statistics import all_differences, view_differences
from trainer.compare.write import (
    COLUMNS,
    best_of,
    best_views,
    differing_settings,
    seconds_text,
    spread_text,
    write_html,
    write_json,
)


def figures(value: float) -> dict[str, dict[str, float]]:
    parts = {part: dict.fromkeys(COLUMNS, value) for part in ("all", "torso", "tail")}
    return parts | {"head": dict.fromkeys(COLUMNS, math.nan)}


@pytest.fixture
def comparison() -> Comparison:
    both, wide, broken = parse_items(["unidec", "wide", "R&D <new>=depsl"], "bag", ["epochs=2"])
    rows = [
        trained_row(
            both,
            [
                Run(
                    seed=seed,
                    folder=f"unidec/seed-{seed}",
                    seconds=10.0 + seed,
                    peak_host_bytes=2_000_000_000,
                    views={
                        "dual_encoder": figures(41.0 + seed),
                        "classifier": figures(35.0 + seed),
                        "concatenation": figures(40.0 + seed),
                    },
                )
                for seed in range(2)
            ],
        ),
        trained_row(
            wide,
            [
                Run(
                    seed=0,
                    folder="wide/seed-0",
                    seconds=70.0,
                    views={
                        "concatenation": figures(44.04),
                        "rescored": figures(49.09),
                        "something new": figures(33.33),
                    },
                ),
                Run(seed=1, folder="wide/seed-1", error="out of <memory>"),
            ],
        ),
        trained_row(broken, [Run(seed=seed, error="there is no $GPU$") for seed in range(2)]),
        measured_row("other system", "ranking", "other.npz", figures(46.06), 3.0),
    ]
    return Comparison(
        created="2024-05-01T00:00:00+00:00",
        bidmatch="0",
        data=Data(
            format="click log",
            files=["a.tsv"],
            fingerprint="f" * 8,
            split={"kind": "given"},
            phrases=80,
            train_queries=300,
            test_queries=1234,
            test_pairs=50,
        ),
        seeds=[0, 1],
        base="bag",
        assignments=["epochs=2"],
        depth=100,
        propensity={"A": 0.55, "B": 1.5},
        rows=rows,
        query_error={"unidec": 1.4, "other system": 1.5},
        differences=all_differences(rows, 1234),
        views=view_differences(rows, 1234),
    )


def cells(html: str, row: str, view: str, table: int) -> list[tuple[str, str]]:
    """(class, text) of the figures of a view's line in the n-th table of the page."""
    part = re.findall(r"<table>.*?</table>", html, flags=re.S)[table]
    block = part.split(f">{row}</th>")[1]
    line = next(line for line in block.split("</tr>") if f'<td class="view">{view}</td>' in line)
    return re.findall(r'<td class="([^"]*)">([^<]*)</td>', line.split("</td>", 1)[1])


def test_the_page_shows_every_row(comparison, tmp_path: Path):
    write_html(tmp_path, comparison)
    html = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "1,234 held-out queries" in html
    served = cells(html, "unidec", "Φ_D ⊕ N(Φ_C)", 0)
    assert [text for _, text in served[: len(COLUMNS)]] == ["40.5 ± 0.7"] * len(COLUMNS)
    assert all("own" in style for style, _ in cells(html, "unidec", "Φ_D (dual encoder)", 0)[: len(COLUMNS)])
    rescored = cells(html, "wide", "its best, re-scored wide", 0)
    assert rescored[0] == ("best own", "49.1")
    assert cells(html, "wide", "something new", 0)[0][1] == "33.3"
    assert cells(html, "other system", "ranking", 0)[0] == ("", "46.1")
    assert "seed 1 failed: out of &lt;memory&gt;" in html
    assert "R&amp;D &lt;new&gt;" in html
    assert "seed 0 failed: there is no $GPU$" in html
    assert "64 → 512" in html
    assert "2.00 GB" in html
    head = re.findall(r"<h2>Head.*?</table>", html, flags=re.S)[0]
    assert "–" in head
    assert "nan" not in head


def test_the_page_has_plots_and_fetches_nothing(comparison, tmp_path: Path):
    write_html(tmp_path, comparison)
    html = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert html.count("<svg") == 6
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", html.replace("xlink:href", ""))
    assert "<script" not in html


def test_the_json_is_whole_and_has_null_for_nothing(comparison, tmp_path: Path):
    write_json(tmp_path, comparison)
    found = orjson.loads((tmp_path / "compare.json").read_bytes())
    assert [row["name"] for row in found["rows"]] == ["unidec", "wide", "R&D <new>", "other system"]
    assert found["rows"][0]["views"]["concatenation"]["all"]["P@1"]["mean"] == 40.5
    assert found["rows"][0]["views"]["concatenation"]["head"]["P@1"]["mean"] is None
    assert found["rows"][0]["served"] == "concatenation"
    assert found["rows"][1]["served"] == "rescored"
    assert found["rows"][2]["served"] is None
    assert found["rows"][0]["runs"][1]["views"]["classifier"]["tail"]["PSP@5"] == 36.0
    assert {group["why"]: group["reference"] for group in found["differences"]} == {
        "first": "unidec",
        "best": "wide",
    }


@pytest.mark.parametrize("keep", [slice(2, 3), slice(0, 0), slice(3, 4)], ids=["all failed", "none", "one"])
def test_a_page_of_little(comparison, tmp_path: Path, keep):
    rows = comparison.rows[keep]
    write_html(tmp_path, comparison.model_copy(update={"rows": rows, "differences": [], "query_error": {}}))
    html = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert f"Comparison of {len(rows)} methods" in html


def test_the_best_is_marked_where_there_are_rivals(comparison):
    assert best_of(comparison.rows, "all")["P@1"] == ["wide"]
    assert best_of(comparison.rows, "head")["P@1"] == []
    assert best_of(comparison.rows[:1], "all")["P@1"] == []
    assert best_views(comparison.rows[0], "all")["P@1"] == ["dual_encoder"]


def test_only_settings_that_differ_are_listed(comparison):
    names, values = differing_settings(comparison.rows)
    assert {"wide_dim", "heads", "batch.cluster_size"} <= set(names)
    assert "epochs" not in names
    assert values["wide"]["wide_dim"] == 512


def test_figures_as_text():
    assert spread_text(Spread(mean=44.66, sd=0.28, n=3)) == "44.7 ± 0.3"
    assert spread_text(Spread(mean=44.66)) == "44.7"
    assert spread_text(Spread(mean=math.nan)) == "–"
    assert spread_text(None) == "–"
    assert seconds_text(Spread(mean=1234.5, sd=2.2, n=2)) == "1,234 ± 2"
    assert seconds_text(Spread(mean=3.21)) == "3.2"
