"""The label pool and P^B against the paper's sets, and the samples against chance."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from trainer.mining import without_positives
from trainer.run import few_positives
from trainer.sampling import (
    label_pool,
    pairs_of,
    sample_hard_negatives,
    sample_in_rows,
    sample_places,
    sample_positives,
)


def csr(positives: list[set[int]], labels: int) -> sp.csr_matrix:
    columns = [label for mine in positives for label in sorted(mine)]
    ends = np.cumsum([0, *(len(mine) for mine in positives)])
    return sp.csr_matrix((np.ones(len(columns), np.float32), columns, ends), (len(positives), labels))


def test_p_b_of_a_known_batch():
    # Rows of the log; the batch is queries 3, 0, 2 (β = 1, η = 1), query 1 is not in it.
    clicks = csr([{0, 1, 2}, {5, 9}, {1, 4, 7}, {8}], labels=10)
    rows = np.array([3, 0, 2])
    # H of query 3 is 7: a positive of query 2. H of query 0 is 6, nobody's. H of query 2 is empty.
    hard = np.array([[7, -1], [6, -1], [-1, -1]], dtype=np.int32)

    def sampled(seed: int) -> list[int]:
        return sample_positives(clicks, rows, 1, np.random.default_rng(seed)).tolist()

    # 8 from query 3; 1 from query 0, which is an unsampled positive of query 2; 4 from query 2.
    seed = next(seed for seed in range(1000) if sampled(seed) == [8, 1, 4])
    pool = label_pool(clicks, rows, hard, 1, 1, np.random.default_rng(seed))

    assert pool.labels.tolist() == [1, 4, 6, 7, 8]
    assert pool.positives.tolist() == [
        [0, 0, 0, 0, 1],  # query 3: its own 8
        [1, 0, 0, 0, 0],  # query 0: its sampled 1; 0 and 2 were not sampled by anyone
        [1, 1, 0, 1, 0],  # query 2: its sampled 4, query 0's 1, and 7, mined as hard for query 3
    ]


@st.composite
def batches(draw):
    labels = draw(st.integers(1, 30))
    queries = draw(st.integers(1, 12))
    some = st.sets(st.integers(0, labels - 1), max_size=min(labels, 9))
    positives = [draw(some) for _ in range(queries)]
    width = draw(st.integers(0, 6))
    hard = np.full((queries, width), -1, dtype=np.int32)
    for row in range(queries):
        others = sorted(set(range(labels)) - positives[row])
        mine = draw(st.permutations(others))[: draw(st.integers(0, width))] if width else []
        hard[row, : len(mine)] = mine
    rows = draw(st.lists(st.integers(0, queries - 1), min_size=1, max_size=queries, unique=True))
    return positives, labels, np.array(rows), hard[rows]


@given(batches(), st.integers(1, 4), st.integers(0, 4), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_pool_and_positives_are_the_papers_sets(batch, beta, eta, seed):
    positives, labels, rows, hard = batch
    clicks = csr(positives, labels)
    rng = np.random.default_rng(seed)
    sampled = set(sample_positives(clicks, rows, beta, rng).tolist())
    mined = set(sample_hard_negatives(hard, eta, rng).tolist())
    pool = label_pool(clicks, rows, hard, beta, eta, np.random.default_rng(seed))

    assert pool.labels.tolist() == sorted(sampled | mined)
    assert -1 not in pool.labels
    for place, row in enumerate(rows):
        in_pool = {int(label) for label in pool.labels[pool.positives[place] > 0]}
        assert in_pool == positives[row] & (sampled | mined)
        assert len(in_pool) >= min(beta, len(positives[row]))
    assert set(np.unique(pool.positives)) <= {0.0, 1.0}


@given(batches(), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_samples_are_of_each_row_and_at_most_so_many(batch, count, seed):
    positives, labels, rows, hard = batch
    clicks = csr(positives, labels)
    for row in rows:
        drawn = sample_positives(clicks, np.array([row]), count, np.random.default_rng(seed)).tolist()
        assert len(drawn) == len(set(drawn)) == min(count, len(positives[row]))
        assert set(drawn) <= positives[row]
    for place in range(len(rows)):
        owned = {int(label) for label in hard[place] if label >= 0}
        drawn = sample_hard_negatives(hard[place : place + 1], count, np.random.default_rng(seed)).tolist()
        assert len(drawn) == len(set(drawn)) == min(count, len(owned))
        assert set(drawn) <= owned
        assert not set(drawn) & positives[rows[place]]


@given(batches(), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_hard_negatives_are_the_best_candidates_without_the_positives(batch, keep, seed):
    positives, labels, _, _ = batch
    rng = np.random.default_rng(seed)
    width = int(rng.integers(1, labels + 1))
    candidates = np.stack([rng.permutation(labels)[:width] for _ in positives]).astype(np.int64)
    hard = without_positives(candidates, csr(positives, labels), keep)
    assert hard.shape == (len(positives), keep)
    for row, mine in enumerate(positives):
        expected = [label for label in candidates[row].tolist() if label not in mine][:keep]
        assert hard[row].tolist() == expected + [-1] * (keep - len(expected))


@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4], [1, 2, 4, 6, 7]], ids=["all valid", "with gaps"])
def test_every_subset_is_equally_likely(places):
    rng = np.random.default_rng(0)
    valid = np.zeros((20_000, 8), dtype=bool)
    valid[:, places] = True
    chosen = sample_in_rows(valid, 2, rng)
    assert (chosen.sum(1) == 2).all()
    counts = Counter(tuple(np.flatnonzero(row)) for row in chosen)
    assert set(counts) == set(combinations(places, 2))
    assert chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_set_of_places_is_equally_likely(count):
    places = np.sort(sample_places(np.full(20_000, 5), count, np.random.default_rng(0)), axis=1)
    counts = Counter(map(tuple, places))
    assert set(counts) == set(combinations(range(5), count))
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_places_of_rows_with_few():
    places = sample_places(np.array([0, 1, 3, 4]), 3, np.random.default_rng(0))
    assert places[:3].tolist() == [[-1, -1, -1], [0, -1, -1], [0, 1, 2]]
    assert len(set(places[3])) == 3
    assert set(places[3]) <= set(range(4))


def test_pairs_come_in_blocks_that_together_are_all(monkeypatch):
    monkeypatch.setattr("trainer.sampling._PAIRS_AT_ONCE", 4)
    clicks = csr([{0, 3}, set(), {1, 2, 4, 5, 6, 7}, {9}, {0, 9}, {8}], labels=10)
    rows = np.array([4, 2, 1, 0, 3, 5])
    blocks = list(pairs_of(clicks, rows))
    assert [len(flat) for _, flat in blocks] == [2, 6, 4]
    found = [
        (int(rows[row]), int(clicks.indices[at])) for block in blocks for row, at in zip(*block, strict=True)
    ]
    assert found == [(int(row), int(label)) for row in rows for label in clicks[row].indices]


def test_positives_and_hard_negatives_are_drawn_uniformly():
    clicks = csr([set(range(10, 20))], labels=40)
    hard = np.array([[30, 31, 32, 33, 34, 35, -1, -1]], dtype=np.int32)
    rng = np.random.default_rng(1)
    rows = np.zeros(6000, dtype=np.int64)
    positives = np.bincount(sample_positives(clicks, rows, 1, rng), minlength=40)[10:20]
    negatives = np.bincount(sample_hard_negatives(np.repeat(hard, 6000, 0), 1, rng), minlength=40)[30:36]
    assert positives.sum() == negatives.sum() == 6000
    assert chisquare(positives).pvalue > 1e-3
    assert chisquare(negatives).pvalue > 1e-3


def test_no_hard_negatives_where_none_are_asked_for():
    clicks = csr([{0}, {2}], labels=3)
    rows = np.array([0, 1])
    for hard in (np.array([[1], [1]], dtype=np.int32), np.zeros((2, 0), dtype=np.int32)):
        pool = label_pool(clicks, rows, hard, 2, 0, np.random.default_rng(0))
        assert pool.labels.tolist() == [0, 2]
        assert pool.positives.tolist() == [[1, 0], [0, 1]]


def test_a_batch_whose_queries_have_no_labels_has_an_empty_pool():
    pool = label_pool(
        csr([set(), set()], 3), np.array([0, 1]), np.zeros((2, 0), np.int32), 2, 2, np.random.default_rng(0)
    )
    assert pool.labels.shape == (0,)
    assert pool.positives.shape == (2, 0)


@pytest.mark.parametrize(
    ("per_query", "drawn", "said"), [(9, 3, False), (10, 3, True), (4, 1, True), (0, 3, False)]
)
def test_a_log_of_which_steps_see_little_is_told(per_query, drawn, said):
    clicks = sp.csr_matrix(np.tile(np.arange(12) < per_query, (5, 1)))
    hint = few_positives(clicks, drawn)
    assert (hint is not None) == said
    assert hint is None or hint.startswith(
        f"queries have {per_query}.0 phrases each and a step draws {drawn}"
    )
