"""The measures against napkinXC's, against hand-worked cases, and where the formulas are not defined."""

from __future__ import annotations

import math

import napkinxc.metrics as nx
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.metrics import (
    by_frequency,
    by_volume,
    coverage_at_k,
    evaluate_ranking,
    hits,
    most_filtered,
    ndcg_at_k,
    precision_at_k,
    propensities,
    psp_at_k,
    recall_at_k,
    without_filtered,
)


def matrix(rows: list[list[int]], n_labels: int) -> sp.csr_matrix:
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([label for row in rows for label in row], dtype=np.int64)
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), n_labels))


def ranking(rows: list[list[int]], width: int) -> np.ndarray:
    out = np.full((len(rows), width), -1, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row[:width]
    return out


@st.composite
def cases(draw):
    """(n_labels, truth rows, ranking rows, training counts): sizes down to one query, rows down to empty."""
    n_labels = draw(st.integers(1, 12))
    n = draw(st.integers(1, 8))
    some = st.lists(st.integers(0, n_labels - 1), unique=True, max_size=n_labels)
    truth = draw(st.lists(some, min_size=n, max_size=n))
    ranks = draw(st.lists(some, min_size=n, max_size=n))
    counts = draw(st.lists(st.integers(0, 300), min_size=n_labels, max_size=n_labels))
    return n_labels, truth, ranks, np.array(counts)


def same(ours: float, theirs: float) -> bool:
    return ours == pytest.approx(100.0 * theirs, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 15), st.integers(1, 14))
def test_agrees_with_napkinxc(case, k, width):
    n_labels, truth_rows, rank_rows, counts = case
    truth, topk = matrix(truth_rows, n_labels), ranking(rank_rows, width)
    rank_rows = [row[:width] for row in rank_rows]
    assert same(precision_at_k(topk, truth, k), nx.precision_at_k(truth_rows, rank_rows, k)[-1])
    assert same(recall_at_k(topk, truth, k), nx.recall_at_k(truth_rows, rank_rows, k)[-1])
    assert same(ndcg_at_k(topk, truth, k), nx.ndcg_at_k(truth_rows, rank_rows, k)[-1])
    p = propensities(counts, 1000)
    if any(truth_rows):
        assert same(coverage_at_k(topk, truth, k), nx.coverage_at_k(truth_rows, rank_rows, k)[-1])
        assert same(psp_at_k(topk, truth, k, p), nx.psprecision_at_k(truth_rows, rank_rows, 1 / p, k)[-1])
    else:
        assert math.isnan(coverage_at_k(topk, truth, k))
        assert math.isnan(psp_at_k(topk, truth, k, p))


@pytest.mark.parametrize(("a", "b"), [(0.55, 1.5), (0.5, 0.4), (0.6, 2.6)])
def test_propensities_agree_with_napkinxc(a, b):
    train = sp.random(400, 60, density=0.005, format="csr", random_state=np.random.default_rng(1))
    train.data[:] = 1
    counts = np.asarray(train.sum(axis=0)).reshape(-1)
    expected = 1 / nx.Jain_et_al_inverse_propensity(train, a, b)
    assert np.abs(propensities(counts, 400, a, b) - expected).max() < 1e-12
    assert (counts == 0).any()


def test_scores_with_ties_agree_once_ranked():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 3, (50, 20)).astype(float)
    topk = np.argsort(-scores, axis=1, kind="stable")
    truth = sp.csr_matrix(rng.random((50, 20)) < 0.2, dtype=np.float32)
    p = propensities(rng.integers(0, 50, 20), 500)
    ranked = topk.tolist()
    ours = evaluate_ranking(topk, truth, (1, 3, 5), (10,), p)
    for k in (1, 3, 5):
        assert same(ours[f"P@{k}"], nx.precision_at_k(truth, ranked, 5)[k - 1])
        assert same(ours[f"PSP@{k}"], nx.psprecision_at_k(truth, ranked, 1 / p, 5)[k - 1])
        assert same(ours[f"nDCG@{k}"], nx.ndcg_at_k(truth, ranked, k)[-1])
    assert same(ours["recall@10"], nx.recall_at_k(truth, ranked, 10)[-1])
    assert same(ours["coverage@10"], nx.coverage_at_k(truth, ranked, 10)[-1])


def test_by_hand():
    truth = matrix([[0, 1], [2], []], 4)
    topk = ranking([[0, 3, 1], [3, 2], [1]], 3)
    assert precision_at_k(topk, truth, 1) == pytest.approx(100 / 3)
    assert precision_at_k(topk, truth, 3) == pytest.approx(100 * (2 / 3 + 1 / 3 + 0) / 3)
    assert recall_at_k(topk, truth, 3) == pytest.approx(100 * 2 / 3)
    assert coverage_at_k(topk, truth, 1) == pytest.approx(100 / 3)
    p = np.array([1.0, 0.5, 0.25, 1.0])
    assert psp_at_k(topk, truth, 1, p) == pytest.approx(100 * 1 / (2 + 4))
    assert psp_at_k(topk, truth, 2, p) == pytest.approx(100 * (1 + 4) / (1 + 2 + 4))


def test_values_of_the_truth_do_not_matter_and_explicit_zeros_are_not_relevant():
    truth = matrix([[0, 1, 2]], 3)
    truth.data[:] = [7.0, 0.0, 0.5]
    topk = ranking([[1, 2, 0]], 3)
    assert hits(topk, truth).tolist() == [[False, True, True]]
    assert recall_at_k(topk, truth, 2) == pytest.approx(50)
    assert psp_at_k(topk, truth, 3, np.ones(3)) == pytest.approx(100)
    assert coverage_at_k(topk, truth, 2) == pytest.approx(50)


def test_measures_of_nothing_are_nan_not_zero():
    out = evaluate_ranking(np.zeros((0, 5), np.int64), matrix([], 3), propensity=np.ones(3))
    assert all(math.isnan(value) for value in out.values())
    no_labels = evaluate_ranking(ranking([[0, 1]], 2), matrix([[]], 3), propensity=np.ones(3))
    assert no_labels["P@1"] == no_labels["recall@10"] == no_labels["nDCG@5"] == 0
    assert math.isnan(no_labels["PSP@1"])
    assert math.isnan(no_labels["coverage@10"])


def test_empty_ranking_scores_zero():
    out = evaluate_ranking(np.zeros((2, 0), np.int64), matrix([[0], [1]], 2), propensity=np.ones(2))
    assert set(out.values()) == {0.0}


@pytest.mark.parametrize("n_train", [0, 1, 2])
def test_propensities_of_a_tiny_log_are_one(n_train):
    assert propensities(np.array([0, 1, 2]), n_train).tolist() == [1, 1, 1]


def test_propensity_rises_with_clicks_within_bounds():
    p = propensities(np.array([0, 1, 5, 100, 10**6]), 10**7)
    assert (np.diff(p) > 0).all()
    assert 0 < p.min() < p.max() < 1


@pytest.mark.parametrize("bad", [np.array([[3]]), np.array([[-2]])])
def test_a_label_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="outside"):
        precision_at_k(bad, matrix([[0]], 3), 1)


def test_shapes_and_k_are_checked():
    with pytest.raises(ValueError, match="does not fit"):
        precision_at_k(np.zeros((2, 1), np.int64), matrix([[0]], 3), 1)
    with pytest.raises(ValueError, match="at least 1"):
        precision_at_k(np.zeros((1, 1), np.int64), matrix([[0]], 3), 0)


def test_head_torso_tail_bounds_and_meaning():
    counts = np.array([101, 100, 10, 9, 0])
    truth = matrix([[0, 3], [1, 2], [4]], 5)
    topk = ranking([[0, 1, 3], [3, 2], [4]], 3)
    out = by_frequency(topk, truth, counts, ks=(1,), recall_ks=(2, 3))
    assert [out[b]["labels"] for b in ("head", "torso", "tail")] == [1, 2, 2]
    assert [out[b]["queries"] for b in ("head", "torso", "tail")] == [1, 1, 2]
    assert out["head"]["P@1"] == 100
    assert out["torso"]["P@1"] == 0
    assert out["torso"]["recall@2"] == 50
    assert out["tail"]["recall@2"] == 50
    assert out["tail"]["recall@3"] == 100


def test_an_empty_bin_is_nan():
    out = by_frequency(ranking([[0]], 1), matrix([[0]], 1), np.array([1000]))
    assert out["head"]["P@1"] == 100
    assert math.isnan(out["tail"]["P@1"])


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 6))
def test_contributions_add_up(case, bins):
    n_labels, truth_rows, rank_rows, counts = case
    truth, topk = matrix(truth_rows, n_labels), ranking(rank_rows, n_labels)
    p = propensities(counts, 1000)
    whole = evaluate_ranking(topk, truth, propensity=p)
    parts = by_volume(topk, truth, counts, bins=bins, propensity=p)
    assert len(parts) == bins
    assert sum(part["labels"] for part in parts) == n_labels
    assert sum(part["volume"] for part in parts) == counts.sum()
    for name in ("P@1", "P@5", "PSP@3", "recall@10", "recall@100"):
        assert sum(part[name] for part in parts) == pytest.approx(whole[name], abs=1e-9, nan_ok=True)


def test_equal_volume_bins_are_equal_where_labels_are_small():
    counts = np.random.default_rng(3).integers(0, 20, 5000)
    parts = by_volume(ranking([[0]], 1), matrix([[0]], 5000), counts, bins=5)
    volumes = np.array([part["volume"] for part in parts])
    assert np.abs(volumes - volumes.mean()).max() <= 20
    assert [part["most"] for part in parts] == sorted((part["most"] for part in parts), reverse=True)
    assert parts[-1]["fewest"] == 0


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 14))
def test_filtered_labels_leave_and_the_rest_moves_up(case, k):
    n_labels, filtered, ranks, _ = case
    topk = ranking(ranks, n_labels + 1)
    out = without_filtered(topk, matrix(filtered, n_labels), k)
    for row, mine, gone in zip(out.tolist(), topk.tolist(), filtered, strict=True):
        left = [label for label in mine if label not in gone]
        assert row == (left + [-1] * (len(mine) - len(left)))[:k]


def test_a_place_without_a_phrase_of_the_data_stays_one():
    out = without_filtered(np.array([[4, -1, 2, 3]]), matrix([[4, 3]], 5), 4)
    assert out.tolist() == [[-1, 2, -1, -1]]


def test_no_filter_cuts_only():
    topk = np.array([[1, 2, 0]])
    assert without_filtered(topk, None, 2).tolist() == [[1, 2]]
    assert without_filtered(topk, matrix([[]], 3), 2).tolist() == [[1, 2]]
    assert most_filtered(None) == most_filtered(matrix([[]], 3)) == most_filtered(matrix([], 3)) == 0
    assert most_filtered(matrix([[1], [0, 2]], 3)) == 2


def test_precision_counts_what_stands_behind_filtered_labels():
    """The query's own label stands first and is filtered: what it was right about counts from place 1."""
    topk, truth, filtered = np.array([[7, 3, 5, 1]]), matrix([[3, 1]], 8), matrix([[7]], 8)
    assert precision_at_k(topk, truth, 1) == 0
    assert precision_at_k(without_filtered(topk, filtered, 3), truth, 1) == 100
    assert recall_at_k(without_filtered(topk, filtered, 3), truth, 3) == 100
