from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from trainer.mining import (
    _SCORES_AT_ONCE,
    approximate_top_k,
    build_index,
    exact_top_k,
    mine_hard_negatives,
    without_positives,
)


def unit_vectors(n: int, d: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=1)


def one_positive_each(n: int, labels: int, seed: int = 0) -> sp.csr_matrix:
    columns = np.random.default_rng(seed).integers(0, labels, n)
    return sp.csr_matrix((np.ones(n, np.float32), columns, np.arange(n + 1)), (n, labels))


def test_exact_is_the_order_of_inner_products():
    queries, labels = unit_vectors(30, 8, 0), unit_vectors(50, 8, 1)
    found = exact_top_k(queries, labels, 10)
    for row in range(30):
        products = [float(torch.dot(queries[row], label)) for label in labels]
        assert found[row].tolist() == sorted(range(50), key=lambda j: -products[j])[:10]


def test_excluded_labels_are_not_found(monkeypatch):
    queries, labels = unit_vectors(20, 8, 0), unit_vectors(12, 8, 1)
    pairs = sp.random(20, 12, 0.4, format="csr", random_state=0, dtype=np.float32) > 0
    pairs = pairs.tolil()
    pairs[3] = True
    pairs = pairs.tocsr()
    order = exact_top_k(queries, labels, 12)
    monkeypatch.setitem(_SCORES_AT_ONCE, "cpu", 60)
    found = exact_top_k(queries, labels, 10, excluded=pairs)
    for row in range(20):
        left = [label for label in order[row].tolist() if not pairs[row, label]]
        assert found[row].tolist() == (left + [-1] * 10)[:10]
    assert found[3].tolist() == [-1] * 10


def test_exact_in_blocks_equals_exact_at_once(monkeypatch):
    queries, labels = unit_vectors(37, 8, 0), unit_vectors(50, 8, 1)
    whole = exact_top_k(queries, labels, 5)
    monkeypatch.setitem(_SCORES_AT_ONCE, "cpu", 200)
    assert np.array_equal(exact_top_k(queries, labels, 5), whole)


def test_approximate_finds_nearly_what_exact_finds():
    queries, labels = unit_vectors(200, 16, 0), unit_vectors(3000, 16, 1)
    exact = exact_top_k(queries, labels, 20)
    index = build_index(labels.numpy(), threads=1)
    near = approximate_top_k(index, queries, labels.numpy(), 20, threads=1)
    assert near.shape == exact.shape
    overlap = np.mean([len(set(a) & set(b)) / 20 for a, b in zip(exact, near, strict=True)])
    assert overlap > 0.9


@pytest.mark.parametrize("exact_up_to", [1000, 0], ids=["exact", "approximate"])
def test_fewer_labels_than_asked_for(exact_up_to):
    queries, labels = unit_vectors(20, 8, 0), unit_vectors(6, 8, 1)
    clicks = one_positive_each(20, 6)
    hard = mine_hard_negatives(queries, labels, clicks, 15, exact_up_to, threads=1)
    assert hard.shape == (20, 15)
    for row in range(20):
        others = set(range(6)) - {int(clicks.indices[row])}
        assert set(hard[row][hard[row] >= 0].tolist()) == others
        assert hard[row].tolist()[5:] == [-1] * 10


@pytest.mark.parametrize("exact_up_to", [1000, 0], ids=["exact", "approximate"])
def test_labels_that_all_look_alike(exact_up_to):
    # Phrases without a known word, and phrases that differ in their match type only, share one vector.
    queries = unit_vectors(20, 8, 0)
    labels = torch.cat([unit_vectors(1, 8, 1).repeat(400, 1), unit_vectors(20, 8, 2)])
    hard = mine_hard_negatives(queries, labels, one_positive_each(20, 420), 15, exact_up_to, threads=1)
    assert (hard >= 0).all()


def test_a_query_with_more_positives_than_candidates():
    labels = unit_vectors(40, 8, 1)
    queries = labels[:2].clone()
    # Query 0 owns its 30 nearest labels, more than are searched for; query 1 owns none.
    nearest = exact_top_k(queries[:1], labels, 30)[0]
    clicks = sp.csr_matrix((np.ones(30, np.float32), np.sort(nearest), [0, 30, 30]), (2, 40))
    candidates = exact_top_k(queries, labels, 20)
    hard = without_positives(candidates, clicks, 5)
    assert hard[0].tolist() == [-1] * 5
    assert hard[1].tolist() == candidates[1, :5].tolist()


def test_no_query_loses_its_hard_negatives_to_usual_positives():
    rng = np.random.default_rng(0)
    queries, labels = unit_vectors(50, 8, 0), unit_vectors(300, 8, 1)
    nearest = exact_top_k(queries, labels, 8)
    counts = rng.integers(1, 9, 50)
    columns = np.concatenate([np.sort(nearest[row, :count]) for row, count in enumerate(counts)])
    clicks = sp.csr_matrix((np.ones(len(columns), np.float32), columns, np.cumsum([0, *counts])), (50, 300))
    hard = mine_hard_negatives(queries, labels, clicks, 6, 1000, threads=1)
    ranked = exact_top_k(queries, labels, 300)
    for row in range(50):
        mine = set(clicks.indices[clicks.indptr[row] : clicks.indptr[row + 1]].tolist())
        assert hard[row].tolist() == [label for label in ranked[row].tolist() if label not in mine][:6]


def test_blocks_of_queries_are_treated_alike():
    # More queries than one block of `without_positives` holds.
    n = 65_536 + 100
    candidates = np.tile(np.arange(4), (n, 1))
    columns = np.arange(n) % 4
    clicks = sp.csr_matrix((np.ones(n, np.float32), columns, np.arange(n + 1)), (n, 4))
    hard = without_positives(candidates, clicks, 3)
    expected = np.array([[label for label in range(4) if label != own] for own in range(4)])
    assert np.array_equal(hard, expected[columns])
