"""Relevance beside the score: what is answered, what `min_relevance` leaves out, and bundles without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from bidmatch.base.errors import ConfigError
from bidmatch.commands.score import command as score
from service.engine import Engine, EngineSettings

QUERIES = ["cheap fan", "red garden hose", "buy wireless drill", "kids chair steel"]


@pytest.fixture(scope="module")
def engine(small_bundle: Path) -> Engine:
    return Engine.load(small_bundle, EngineSettings(honour_match_types=False))


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> Engine:
    """Of a bundle without a calibration."""
    return Engine.load(tiny_bundle)


def test_it_is_the_curve_of_the_manifest_at_the_score(engine: Engine) -> None:
    record = engine.bundle.manifest.calibration
    assert record is not None
    found = engine.match(QUERIES, 20)
    assert found.relevance is not None
    np.testing.assert_allclose(
        found.relevance, np.interp(found.scores, record.scores, record.relevance), atol=1e-6
    )
    assert found.relevance.dtype == np.float32


def test_the_least_relevance_keeps_those_that_have_it(engine: Engine) -> None:
    whole = engine.match(QUERIES, 54)
    assert whole.relevance is not None
    for wanted in np.unique(whole.relevance)[[3, -10, -2]].tolist():
        found = engine.match(QUERIES, 54, engine.least_score(None, wanted))
        keep = whole.exact | (whole.relevance >= np.float32(wanted))
        np.testing.assert_array_equal(found.rows, whole.rows[keep])
        assert 0 < keep.sum() < len(keep)


def test_of_two_bounds_the_stricter_one_holds(engine: Engine) -> None:
    assert engine.least_score(None, None) is None
    assert engine.least_score(0.3, None) == 0.3
    least = engine.least_score(None, 0.1)
    assert least is not None
    assert engine.least_score(least - 0.1, 0.1) == least
    assert engine.least_score(least + 0.1, 0.1) == least + 0.1


@pytest.mark.parametrize("honour", [True, False])
def test_over_http(application: Callable, small_bundle: Path, honour: bool) -> None:
    service = application(small_bundle, honour_match_types=honour)
    body: dict[str, Any] = {"query": "red garden hose", "k": 54}
    whole = service.ask("POST", "/match", json=body).json()["matches"]
    assert len(whole) == (54 if not honour else 18)
    assert all(0 <= match["relevance"] <= 1 for match in whole)
    bound = sorted(match["relevance"] for match in whole)[-5]
    for answer in (
        service.ask("POST", "/match", json=body | {"min_relevance": bound}),
        service.ask("GET", "/match", params={"q": body["query"], "k": 54, "min_relevance": bound}),
    ):
        kept = [match for match in whole if match["source"] == "exact" or match["relevance"] >= bound]
        assert [match["id"] for match in answer.json()["matches"]] == [match["id"] for match in kept]
        assert 0 < len(kept) < len(whole)


def test_a_bundle_without_calibration_has_none_and_says_so(
    plain: Engine, application: Callable, tiny_bundle: Path
) -> None:
    assert plain.match(QUERIES, 5).relevance is None
    assert plain.match([" "], 5).relevance is None
    with pytest.raises(ConfigError, match="no calibration"):
        plain.least_score(None, 0.5)
    service = application(tiny_bundle)
    answer = service.ask("POST", "/match", json={"query": "red shoes"})
    assert all("relevance" not in match for match in answer.json()["matches"])
    body = {"query": "red shoes", "min_relevance": 0.5}
    for where, refused in (
        ("body.min_relevance", service.ask("POST", "/match", json=body)),
        ("body.min_relevance", service.ask("POST", "/admin/explain", json=body)),
        ("query.min_relevance", service.ask("GET", "/match", params={"q": "red", "min_relevance": 0.5})),
    ):
        assert refused.status_code == 422
        assert "no calibration" in refused.json()["detail"]
        assert [error["where"] for error in refused.json()["errors"]] == [where]


def test_a_curve_of_re_scored_answers_is_not_used_for_others(small_wide_bundle: Path) -> None:
    assert Engine.load(small_wide_bundle).match(QUERIES, 5).relevance is not None
    narrow = Engine.load(small_wide_bundle, EngineSettings(rescore=False))
    assert narrow.match(QUERIES, 5).relevance is None


def scored(bundle: Path, folder: Path, *options: str) -> Any:
    log, out = folder / "log.tsv", folder / "out.parquet"
    log.write_text("query\n" + "\n".join(QUERIES) + "\n", encoding="utf-8")
    arguments = ["--bundle", bundle, "--input", log, "--output", out, "--threads", 1, "--overwrite", *options]
    done = CliRunner().invoke(score, [str(one) for one in arguments])
    if done.exception is not None:
        raise done.exception
    return pq.read_table(out)


def test_a_scored_log_has_a_column_of_it(small_bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    table = scored(small_bundle, tmp_path)
    assert table.column_names[6:10] == ["encoder", "classifier", "relevance", "source"]
    assert table["relevance"].null_count == 0
    bound = sorted(table["relevance"].to_pylist())[20]
    kept = scored(small_bundle, tmp_path, "--min-relevance", str(bound))
    exact = np.array(table["source"].to_pylist()) == "exact"
    expected = table.filter(exact | (table["relevance"].to_numpy() >= np.float32(bound)))
    assert 0 < len(kept) == len(expected) < len(table)
    assert kept["id"].to_pylist() == expected["id"].to_pylist()
    none = scored(tiny_bundle, tmp_path)
    assert none["relevance"].null_count == len(none) > 0
    with pytest.raises(ConfigError, match="no calibration"):
        scored(tiny_bundle, tmp_path, "--min-relevance", "0.5", "--restart")
