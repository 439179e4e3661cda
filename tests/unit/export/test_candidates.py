from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

from export.bundle.encoder import QueryVectors
from export.bundle.format import RescorePoint
from export.bundle.read import WideVectors
from export.bundle.rescore import to_8_bits
from export.quantise import measure_quality
from export.rescoring import JUDGED, choose_candidates, served_exactly, try_candidates
from export.vectors import LabelVectors
from trainer.data.dataset import Interactions


def point(candidates, *figures):
    return RescorePoint(
        candidates=candidates, quality=dict(zip(JUDGED, figures, strict=True)), microseconds=1.0
    )


def test_the_least_that_is_near_the_best_in_every_figure():
    points = [point(50, 49, 18, 84, 94), point(100, 49, 18, 84, 94), point(200, 49.4, 18, 84, 94.3)]
    assert choose_candidates(points).count == 100
    behind_in_one = [point(100, 49, 18, 84, 94), point(200, 49, 18.6, 84, 94), point(400, 49, 18.8, 84, 94)]
    found = choose_candidates(behind_in_one)
    assert found.count == 200
    assert found.curve == tuple(behind_in_one)
    assert "0.20 behind in P@5" in found.reason


def test_recall_at_100_decides_on_how_many_there_are_for_each_match_asked_for():
    points = [point(100, 49, 18, 84, 94), point(200, 49, 18, 84, 95), point(400, 49, 18, 84, 95.2)]
    found = choose_candidates(points)
    assert (found.count, found.per_match) == (100, 2)
    assert "0.20 behind in recall@100" in found.reason
    assert [found.depth(k) for k in (1, 10, 50, 100, 1000)] == [100, 100, 100, 200, 2000]
    few = choose_candidates([point(20, 49, 18, 84, 94), point(54, 49, 18, 84, 94)])
    assert (few.count, few.per_match) == (54, 1)


def test_never_less_than_100_unless_there_are_fewer_phrases():
    assert choose_candidates([point(20, 90, 90, 90, 90), point(100, 50, 50, 50, 50)]).count == 100
    assert choose_candidates([point(20, 50, 50, 50, 50), point(54, 50, 50, 50, 50)]).count == 54


def test_where_none_is_near_the_best_in_all_the_nearest_is_taken():
    points = [point(100, 52, 18, 80, 90), point(200, 51, 18, 84, 90), point(400, 48, 18, 85, 90)]
    found = choose_candidates(points)
    assert found.count == 200
    assert "the nearest" in found.reason


@pytest.fixture(scope="module")
def task():
    """300 phrases, 80 queries near one each, in the wide vectors closely, in the narrow ones roughly."""
    rng = np.random.default_rng(0)

    def unit(rows):
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    owners = rng.integers(0, 300, 80)
    wide = unit(rng.standard_normal((300, 64)))
    wide_queries = unit(wide[owners] + 0.05 * rng.standard_normal((80, 64)))
    turn = rng.standard_normal((64, 6))
    narrow = unit(wide @ turn)
    narrow_queries = unit(wide_queries @ turn + 1.5 * rng.standard_normal((80, 6)))
    truth = sp.csr_matrix((np.ones(80, np.float32), (np.arange(80), owners)), shape=(80, 300))
    labels = LabelVectors(narrow, WideVectors(*to_8_bits(wide, 64), 64))
    texts = pa.array([f"query {row}" for row in range(80)], pa.large_string())
    return QueryVectors(narrow_queries, wide_queries), labels, Interactions(texts, truth), wide


def test_more_candidates_find_more_and_each_figure_is_that_of_brute_force(task):
    queries, labels, asked, wide = task
    points = try_candidates(queries, labels, asked, (20, 100, 200, 400))
    assert [one.candidates for one in points] == [20, 100, 200, 300]
    owners = asked.clicks.indices
    for one in points:
        nearest = np.argsort(-(queries.narrow @ labels.narrow.T), axis=1)[:, : one.candidates]
        scores = np.take_along_axis(queries.wide @ wide.T, nearest, axis=1)
        best = np.take_along_axis(nearest, scores.argmax(axis=1)[:, None], axis=1)[:, 0]
        assert one.quality["P@1"] == pytest.approx(100 * (best == owners).mean(), abs=1e-3)
    quality = [one.quality["P@1"] for one in points]
    assert quality == sorted(quality)
    assert quality[0] < quality[-1] == 100


def test_recall_at_100_is_that_of_a_request_for_100(task):
    queries, labels, asked, _ = task
    few, hundred = try_candidates(queries, labels, asked, (20, 100))
    assert few.quality["recall@100"] == hundred.quality["recall@100"]
    assert few.quality["recall@10"] < hundred.quality["recall@10"]


def test_filtered_phrases_take_no_places(task):
    """With what stood before each query's phrase filtered out, it is first, and still a candidate."""
    queries, labels, asked, wide = task
    owners = asked.clicks.indices
    scores = queries.wide @ wide.T
    before = scores > np.take_along_axis(scores, owners[:, None], axis=1)
    nearest = np.argsort(-(queries.narrow @ labels.narrow.T), axis=1)
    place = (nearest == owners[:, None]).argmax(axis=1)
    for query in range(80):
        before[query, nearest[query, : max(0, place[query] - 9)]] = True
    before[np.arange(80), owners] = False
    filtered = replace(asked, filtered=sp.csr_matrix(before))
    (few,) = try_candidates(queries, labels, filtered, (20,))
    assert few.quality["P@1"] == 100
    assert measure_quality(queries, labels, filtered, 20)["P@1"] == 100
    assert try_candidates(queries, labels, asked, (20,))[0].quality["P@1"] < 100


def test_what_is_served_is_the_candidates_in_the_order_of_the_wide_vectors(task):
    queries, labels, _, wide = task
    rows = served_exactly(queries, labels, 40, "search")
    narrow = served_exactly(queries, LabelVectors(labels.narrow, None), 40, "search")
    assert (np.sort(rows, axis=1) == np.sort(narrow, axis=1)).all()
    scores = np.take_along_axis(queries.wide @ wide.T, rows, axis=1)
    assert (np.diff(scores, axis=1) <= 0.02).all()
    assert not (rows == narrow).all()
