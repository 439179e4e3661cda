"""Search narrow, rank wide: what is answered is the index's candidates in the order of the wide vectors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bidmatch.base.errors import ConfigError
from service.engine import Engine, EngineSettings

QUERIES = ["buy red garden hose", "cheap fan", "花园 软管", "outdoor wireless chair", "10 ft", "unheard of"]


@pytest.fixture(scope="module")
def engine(small_wide_bundle: Path) -> Engine:
    return Engine.load(small_wide_bundle, EngineSettings(honour_match_types=False))


@pytest.fixture(scope="module")
def narrow(small_wide_bundle: Path) -> Engine:
    return Engine.load(small_wide_bundle, EngineSettings(rescore=False, honour_match_types=False))


def wide_parts(engine: Engine, query: str) -> tuple[np.ndarray, np.ndarray]:
    """Both cosines of the query and every phrase, from the 8-bit vectors, by hand."""
    wide = engine.bundle.wide
    assert wide is not None
    vector = engine.encoder.encode([query]).wide[0]
    split = wide.encoder_dim
    parts = []
    for part, columns in enumerate((slice(0, split), slice(split, None))):
        products = wide.rows[:, columns].astype(np.float64) @ vector[columns].astype(np.float64)
        parts.append(np.clip(products * wide.scales[:, part], -1, 1))
    return parts[0], parts[1]


def by_brute_force(engine: Engine, query: str, k: int, candidates: int) -> list[int]:
    """Rows of the best k by the wide score, of the candidates that exact search by narrow vectors gives."""
    vector = engine.encoder.encode([query]).narrow[0]
    nearest = np.argsort(-(np.asarray(engine.bundle.vectors) @ vector), kind="stable")[: max(k, candidates)]
    scores = sum(wide_parts(engine, query))
    return sorted(nearest.tolist(), key=lambda row: (-scores[row], row))[:k]


@pytest.mark.parametrize("k", [1, 10, 20, 30, 54])
@pytest.mark.parametrize("query", QUERIES)
def test_the_ranking_is_brute_force_over_the_candidates(engine: Engine, query: str, k: int) -> None:
    assert engine.candidates == 20
    assert engine.match([query], k).rows.tolist() == by_brute_force(engine, query, k, 20)


def test_it_is_another_ranking_than_the_index_s_own(engine: Engine, narrow: Engine) -> None:
    assert any(
        engine.match([query], 10).rows.tolist() != narrow.match([query], 10).rows.tolist()
        for query in QUERIES
    )


def test_scores_and_parts_are_the_wide_cosines(engine: Engine) -> None:
    for query in QUERIES:
        found = engine.match([query], 54)
        encoder, classifier = wide_parts(engine, query)
        np.testing.assert_allclose(found.encoder, encoder[found.rows], atol=1e-5)
        np.testing.assert_allclose(found.classifier, classifier[found.rows], atol=1e-5)
        np.testing.assert_array_equal(found.scores, found.encoder + found.classifier)
        assert np.abs(found.scores).max() <= 2


def test_min_score_is_the_wide_one(engine: Engine, narrow: Engine) -> None:
    found = engine.match(["cheap fan"], 20)
    threshold = float(found.scores[4])
    assert engine.match(["cheap fan"], 20, threshold).rows.tolist() == found.rows[:5].tolist()
    assert len(narrow.match(["cheap fan"], 20, threshold).rows) != 5


def test_exact_phrases_come_first_with_their_wide_score(engine: Engine) -> None:
    texts = engine.bundle.phrases["text"].to_pylist()
    found = engine.match([text.upper() for text in texts], 5)
    for row in range(54):
        first = found.offsets[row]
        assert found.rows[first] == row
        assert found.exact[first : found.offsets[row + 1]].tolist() == [True, False, False, False, False]
        assert found.scores[first] == pytest.approx(sum(wide_parts(engine, texts[row]))[row], abs=1e-5)
        assert len(set(found.rows[first : found.offsets[row + 1]])) == 5


def test_a_list_gives_what_each_query_alone_gives(engine: Engine) -> None:
    texts = engine.bundle.phrases["text"].to_pylist()
    queries = [*QUERIES, "", *texts[::9], " "]
    together = engine.match(queries, 7)
    for i, query in enumerate(queries):
        part = slice(together.offsets[i], together.offsets[i + 1])
        alone = engine.match([query], 7)
        np.testing.assert_array_equal(together.rows[part], alone.rows)
        np.testing.assert_allclose(together.scores[part], alone.scores, atol=1e-5)
        np.testing.assert_array_equal(together.exact[part], alone.exact)


def test_switched_off_it_answers_as_a_bundle_without_wide_vectors(narrow: Engine, small_bundle: Path) -> None:
    plain = Engine.load(small_bundle, EngineSettings(honour_match_types=False))
    assert narrow.candidates == plain.candidates == 0
    texts = plain.bundle.phrases["text"].to_pylist()
    one, other = narrow.match([*QUERIES, *texts], 10), plain.match([*QUERIES, *texts], 10)
    np.testing.assert_array_equal(one.rows, other.rows)
    np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)
    assert one.timings.rescore == 0


def test_the_number_of_candidates_can_be_another(small_wide_bundle: Path) -> None:
    engine = Engine.load(small_wide_bundle, EngineSettings(candidates=3, honour_match_types=False))
    assert engine.candidates == 3
    for query in QUERIES:
        assert engine.match([query], 2).rows.tolist() == by_brute_force(engine, query, 2, 3)
    more = Engine.load(small_wide_bundle, EngineSettings(candidates=1000, honour_match_types=False))
    assert more.match(["fan"], 5).rows.tolist() == by_brute_force(more, "fan", 5, 54)


def test_a_request_for_many_re_scores_as_many_more_as_the_bundle_says(
    small_wide_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from export.bundle.read import open_bundle

    bundle = open_bundle(small_wide_bundle)
    record = bundle.manifest.rescore
    assert record is not None
    manifest = bundle.manifest.model_copy(update={"rescore": record.model_copy(update={"per_match": 4})})
    engine = Engine(dataclasses.replace(bundle, manifest=manifest), EngineSettings(honour_match_types=False))
    assert [engine.depth(k) for k in (1, 5, 6, 10, 54)] == [20, 20, 24, 40, 54]
    for query in QUERIES:
        assert engine.match([query], 10).rows.tolist() == by_brute_force(engine, query, 10, 40)
    overridden = Engine(
        dataclasses.replace(bundle, manifest=manifest),
        EngineSettings(candidates=15, honour_match_types=False),
    )
    assert [overridden.depth(k) for k in (1, 10, 20)] == [15, 15, 20]


def test_a_bundle_without_wide_vectors_can_not_re_score(small_bundle: Path) -> None:
    with pytest.raises(ConfigError, match="no wide vectors"):
        Engine.load(small_bundle, EngineSettings(rescore=True))
    assert Engine.load(small_bundle, EngineSettings(candidates=100)).candidates == 0


def test_its_time_is_told_apart(engine: Engine) -> None:
    timings = engine.match(["red fan"], 5).timings
    assert min(timings.tokenise, timings.encode, timings.search, timings.rescore) > 0


def test_over_http_answers_have_the_same_shape_and_the_step_is_timed(
    application: Callable, engine: Engine, small_wide_bundle: Path
) -> None:
    both = []
    for rescore in (None, False):
        service = application(small_wide_bundle, rescore=rescore, honour_match_types=False)
        answer = service.ask("POST", "/match", json={"query": "cheap fan", "k": 3})
        both.append((answer, service.ask("GET", "/metrics").text))
    (wide, metrics), (plain, plain_metrics) = both
    # The calibration is of re-scored answers, and says nothing of others.
    assert [set(match) - {"relevance"} for match in wide.json()["matches"]] == [
        set(match) for match in plain.json()["matches"]
    ]
    assert [match["id"] for match in wide.json()["matches"]] == [
        f"p{row}" for row in engine.match(["cheap fan"], 3).rows
    ]
    assert "rescore;dur=" in wide.headers["server-timing"]
    assert "rescore" not in plain.headers["server-timing"]
    assert re.search(r'^bidmatch_rescore_duration_seconds_count{bundle="\w+"} 1.0$', metrics, re.MULTILINE)
    assert "bidmatch_rescore_duration_seconds_count" not in plain_metrics
    assert 'wide_dim="96"' in metrics
    assert 'candidates="20"' in metrics


@pytest.mark.parametrize("head", [0, 1])
def test_the_part_of_a_head_that_is_switched_off_is_0(small_wide_source, tmp_path: Path, head: int) -> None:
    import torch

    from export.build import ExportOptions, build_bundle
    from trainer.model import DualHeadModel

    widths = [(width, 0) if head == 0 else (0, width) for width in (32, 96)]
    torch.manual_seed(1)
    model = DualHeadModel(small_wide_source.model.encoder, widths, 0.1).eval()
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal((54, c)).astype(np.float32) for _, c in widths]
    source = dataclasses.replace(small_wide_source, model=model, table=tables[0], wide_table=tables[1])
    build_bundle(source, tmp_path / "b", ExportOptions(threads=1, candidates=20))
    for settings in (
        EngineSettings(honour_match_types=False),
        EngineSettings(rescore=False, honour_match_types=False),
    ):
        engine = Engine.load(tmp_path / "b", settings)
        found = engine.match(["cheap fan", "red garden hose"], 10)
        off, on = (found.classifier, found.encoder) if head == 0 else (found.encoder, found.classifier)
        assert not off.any()
        np.testing.assert_array_equal(found.scores, on)
        assert np.abs(on).max() > 0.1
        if engine.candidates:
            assert found.rows[:10].tolist() == by_brute_force(engine, "cheap fan", 10, 20)
