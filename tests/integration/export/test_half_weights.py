"""Weights of the halves in a bundle: in the phrases' vectors alone, so that scores are weighted cosines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from bidmatch.commands.export import command as export
from bidmatch.commands.inspect import command as inspect
from export.build import ExportOptions, build_bundle
from export.bundle.read import open_bundle
from service.engine import Engine, EngineSettings


@pytest.fixture(scope="module")
def bundles(small_wide_source, tmp_path_factory: pytest.TempPathFactory):
    """One of 1 : 1 and one of 1.6 : 0.4."""
    folder = tmp_path_factory.mktemp("weights")
    for name, weight in (("even", 1.0), ("odd", 1.6)):
        build_bundle(
            small_wide_source,
            folder / name,
            ExportOptions(threads=1, candidates=54, half_weight=weight),
        )
    return folder / "even", folder / "odd"


def test_the_weights_lie_in_the_phrases_vectors(bundles):
    with open_bundle(bundles[0]) as even, open_bundle(bundles[1]) as odd:
        np.testing.assert_allclose(odd.vectors[:, :16], 1.6 * even.vectors[:, :16], rtol=1e-6)
        np.testing.assert_allclose(odd.vectors[:, 16:], 0.4 * even.vectors[:, 16:], rtol=1e-6)
        np.testing.assert_array_equal(odd.wide.rows, even.wide.rows)
        np.testing.assert_allclose(odd.wide.scales, even.wide.scales * [1.6, 0.4], rtol=1e-6)
        assert odd.wide.weights == pytest.approx((1.6, 0.4))
        assert odd.manifest.files["encoder.onnx"] == even.manifest.files["encoder.onnx"]
        assert odd.manifest.bundle_id != even.manifest.bundle_id
        assert odd.manifest.blend.narrow.reason == "as asked for"


@pytest.mark.parametrize("rescore", [True, False])
def test_parts_are_the_weighted_cosines_and_scores_their_sum(bundles, rescore: bool):
    settings = EngineSettings(rescore=rescore, honour_match_types=False)
    even, odd = (Engine.load(path, settings) for path in bundles)
    queries = even.bundle.phrases["text"].to_pylist()
    one, other = even.match(queries, 54), odd.match(queries, 54)
    order = [np.lexsort((found.rows, np.repeat(np.arange(54), 54))) for found in (one, other)]
    np.testing.assert_allclose(other.encoder[order[1]], 1.6 * one.encoder[order[0]], atol=1e-5)
    np.testing.assert_allclose(other.classifier[order[1]], 0.4 * one.classifier[order[0]], atol=1e-5)
    np.testing.assert_array_equal(other.scores, other.encoder + other.classifier)
    assert np.abs(other.encoder).max() > 1.5
    assert np.abs(other.scores).max() <= 2
    assert (one.rows != other.rows).any()


def test_they_are_chosen_where_none_are_asked_for(small_run, tmp_path):
    arguments = ["--checkpoint", small_run, "--out", tmp_path / "b", "--threads", "1", "--json"]
    done = CliRunner().invoke(export, [str(one) for one in arguments], catch_exceptions=False)
    record = json.loads(done.stdout)["blend"]["narrow"]
    assert record["queries"] >= 50
    assert [point["encoder"] for point in record["curve"]] == [0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6]
    even = record["curve"][3]
    assert (even["gain"], even["error"]) == (0, 0)
    best = max(record["curve"], key=lambda point: point["value"])
    assert record["encoder"] == (best["encoder"] if best["gain"] > best["error"] else 1.0)
    shown = CliRunner().invoke(inspect, [str(tmp_path / "b")], catch_exceptions=False)
    assert "Weights of the halves" in shown.stdout
    assert "Calibration: " in shown.stdout
    page = tmp_path / "calibration.html"
    CliRunner().invoke(inspect, [str(tmp_path / "b"), "--html", str(page)], catch_exceptions=False)
    assert page.read_text(encoding="utf-8").count("<svg") == 2


@pytest.mark.parametrize("given", ["2.1", "-0.5", "nan", "even"])
def test_a_weight_that_is_none_is_refused(small_run, tmp_path, given: str):
    arguments = ["--checkpoint", small_run, "--out", tmp_path / "b", f"--half-weight={given}"]
    done = CliRunner().invoke(export, [str(one) for one in arguments])
    assert done.exit_code == 2
    assert "neither `auto` nor a number from 0 to 2" in done.output
