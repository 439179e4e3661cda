from __future__ import annotations

import numpy as np
import pytest

from export.bundle.index import exact_topk
from export.hnsw import LADDER, RecallTarget, build_index, recall_at_k, search, tune


def clustered(count, dim=16, seed=0):
    """Two unit halves a row, in clusters, as label vectors are."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(1, count // 20), dim))
    rows = centres[rng.integers(0, len(centres), count)] + 0.4 * rng.standard_normal((count, dim))
    halves = np.split(rows, 2, axis=1)
    return np.concatenate(
        [half / np.linalg.norm(half, axis=1, keepdims=True) for half in halves], axis=1
    ).astype(np.float32)


def true_recall(index, queries, vectors, k):
    exact = exact_topk(queries, vectors, k)[0]
    found = search(index, vectors, queries, k)
    return np.mean([len(set(a) & set(b)) / k for a, b in zip(exact, found, strict=True)])


def test_the_target_is_reached_by_an_independent_count():
    vectors, queries = clustered(6000), clustered(300, seed=1)
    tuned = tune(vectors, queries, "queries", RecallTarget(0.99, 100), threads=1, build_threads=1)
    assert tuned.record.reached
    assert true_recall(tuned.index, queries, vectors, 100) >= 0.99
    assert tuned.record.k == 100
    chosen = (tuned.record.M, tuned.record.ef_construction, tuned.record.ef)
    points = {(point.M, point.ef_construction, point.ef): point for point in tuned.record.curve}
    assert points[chosen].recall == tuned.record.recall
    cheaper = [p for p in tuned.record.curve if p.M == tuned.record.M and p.ef < tuned.record.ef]
    assert all(point.recall < 0.99 for point in cheaper)


def test_searches_that_ask_for_more_results_are_measured_as_such():
    vectors, queries = clustered(2000), clustered(100, seed=1)
    target = RecallTarget(0.9, 10, results=200)
    tuned = tune(vectors, queries, "queries", target, threads=1, build_threads=1)
    assert (tuned.record.k, tuned.record.results) == (10, 200)
    assert min(point.ef for point in tuned.record.curve) == 200
    # Asked for 200, the first ten are those of a search that wide.
    assert tuned.record.recall == pytest.approx(
        np.mean(
            [
                len(set(found[:10]) & set(exact)) / 10
                for found, exact in zip(
                    search(tuned.index, vectors, queries, 200),
                    exact_topk(queries, vectors, 10)[0],
                    strict=True,
                )
            ]
        ),
        abs=1e-6,
    )


def test_a_graph_too_thin_is_rebuilt_wider(capsys):
    vectors, queries = clustered(4000), clustered(100, seed=1)
    ladder = ((2, 4), *LADDER)
    target = RecallTarget(0.995, 10)
    tuned = tune(vectors, queries, "queries", target, threads=1, build_threads=1, ladder=ladder)
    assert tuned.record.reached
    assert tuned.record.M >= 16
    assert {point.M for point in tuned.record.curve} >= {2, 16}
    assert "trying wider" in capsys.readouterr().err


def test_a_target_out_of_reach_is_said_and_recorded(capsys):
    vectors, queries = clustered(4000), clustered(100, seed=1)
    target = RecallTarget(1.0, 10)
    tuned = tune(vectors, queries, "queries", target, threads=1, build_threads=1, ladder=((2, 4),))
    assert not tuned.record.reached
    assert tuned.record.recall == max(point.recall for point in tuned.record.curve)
    assert "BELOW the target" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 99])
def test_fewer_phrases_than_k(count):
    vectors = clustered(count)
    tuned = tune(vectors, clustered(5, seed=1), "queries", RecallTarget(), threads=1, build_threads=1)
    assert tuned.record.k == count
    assert tuned.record.recall == 1.0


def test_one_build_thread_gives_the_same_file_twice(tmp_path):
    vectors = clustered(3000)
    for name in ("a", "b"):
        build_index(vectors, 16, 100, threads=1).save_index(str(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_rows_that_tie_with_the_last_place_count_as_found():
    vectors = np.array([[1, 0], [0.5, 0], [0.5, 0], [0.5, 0], [0.1, 0]], dtype=np.float32)
    query = np.array([[1, 0]], dtype=np.float32)
    kth = exact_topk(query, vectors, 2)[1][:, -1]
    assert recall_at_k(np.array([[0, 3]]), query, vectors, kth) == 1.0
    assert recall_at_k(np.array([[0, 4]]), query, vectors, kth) == 0.5


def test_identical_vectors_do_not_stop_a_search():
    vectors = np.repeat(clustered(1), 500, axis=0)
    index = build_index(vectors, 4, 10, threads=1)
    index.set_ef(10)
    rows = search(index, vectors, vectors[:2], 500)
    assert sorted(rows[0]) == list(range(500))
