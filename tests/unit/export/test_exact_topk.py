from __future__ import annotations

import numpy as np
import pytest

from export.bundle import index as index_module
from export.bundle.index import exact_topk


def by_full_sort(queries, vectors, k):
    scores = queries @ vectors.T
    order = np.lexsort((np.broadcast_to(np.arange(len(vectors)), scores.shape), -scores), axis=1)[:, :k]
    return order, np.take_along_axis(scores, order, axis=1)


@pytest.mark.parametrize("k", [1, 7, 40, 200])
@pytest.mark.parametrize("row_block", [3, 50, 1000])
def test_equals_a_full_sort_whatever_the_blocks(monkeypatch, k, row_block):
    monkeypatch.setattr(index_module, "_ROW_BLOCK", row_block)
    monkeypatch.setattr(index_module, "_QUERY_BLOCK", 4)
    rng = np.random.default_rng(k)
    # Small integers: sums are exact in any order, and there are many ties.
    queries = rng.integers(-3, 4, (10, 6)).astype(np.float32)
    vectors = rng.permutation(np.arange(150 * 6)).reshape(150, 6).astype(np.float32)
    rows, scores = exact_topk(queries, vectors, k)
    wanted_rows, wanted_scores = by_full_sort(queries, vectors, min(k, 150))
    assert rows.dtype == np.int64
    assert np.array_equal(scores, wanted_scores)
    assert np.array_equal(rows, wanted_rows)


def test_ties_are_in_row_order():
    vectors = np.ones((9, 2), dtype=np.float32)
    rows, scores = exact_topk(np.ones((1, 2), dtype=np.float32), vectors, 9)
    assert rows.tolist() == [list(range(9))]
    assert set(scores[0].tolist()) == {2.0}


def test_no_queries():
    rows, scores = exact_topk(np.zeros((0, 2), np.float32), np.ones((3, 2), np.float32), 2)
    assert rows.shape == scores.shape == (0, 2)
