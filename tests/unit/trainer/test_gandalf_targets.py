"""Targets of label texts against dense matrices."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainer.config import GandalfConfig
from trainer.gandalf import targets as targets_module
from trainer.gandalf.graph import blocks, click_graph, conditional_rows, glas_rows
from trainer.gandalf.targets import GandalfPairs, choose_labels, gandalf_pairs
from trainer.gandalf.walk import random_walk_rows, visits

DENSE_CLICKS = hnp.arrays(
    np.int8,
    st.tuples(st.integers(1, 14), st.integers(1, 12)),
    elements=st.sampled_from([0, 0, 1]),
)
DELTAS = st.sampled_from([0.0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.99])


def pairs_of(dense: np.ndarray, seed: int = 0, **settings: object) -> GandalfPairs:
    config = GandalfConfig.model_validate(settings)
    return gandalf_pairs(sp.csr_matrix(dense.astype(np.float32)), config, np.random.default_rng(seed))


def conditionals(dense: np.ndarray) -> np.ndarray:
    """P[j, i] = G_ij / G_jj, and 1 for a label without queries and itself."""
    G = dense.astype(np.int64).T @ dense
    n = np.diag(G)
    P = np.divide(G, n[:, None], where=n[:, None] > 0, out=np.zeros(G.shape))
    np.fill_diagonal(P, 1.0)
    return P


@settings(deadline=None, max_examples=150)
@given(DENSE_CLICKS, DELTAS)
def test_conditional_targets_are_those_of_a_dense_graph(dense, delta):
    P = conditionals(dense)
    expected = np.where(delta < P, P, 0)
    found = pairs_of(dense, graph="conditional", delta=delta)
    np.testing.assert_array_equal(found.labels, np.arange(dense.shape[1]))
    np.testing.assert_array_equal(found.targets.toarray(), expected.astype(np.float32))


@settings(deadline=None, max_examples=150)
@given(DENSE_CLICKS, DELTAS)
def test_glas_targets_are_those_of_a_dense_graph(dense, delta):
    P = conditionals(dense)
    S = 0.5 * (P + P.T)
    expected = np.where(delta < S, 1 / (1 + np.exp(-S)), 0)
    found = pairs_of(dense, graph="glas", delta=delta).targets.toarray()
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(found, found.T)


@settings(deadline=None, max_examples=50)
@given(DENSE_CLICKS, DELTAS)
def test_self_targets_are_the_identity(dense, delta):
    found = pairs_of(dense, graph="self", delta=delta).targets.toarray()
    np.testing.assert_array_equal(found, np.eye(dense.shape[1]))


def walked_step_by_step(
    dense: np.ndarray, length: int, restart: float, rng: np.random.Generator
) -> np.ndarray:
    """Visits Ĝ[j, i], one step after another as the text of ECLARE tells it."""
    Y = dense > 0
    counts = np.zeros((Y.shape[1], Y.shape[1]))
    for start in range(Y.shape[1]):
        if not Y[:, start].any():
            continue
        place = start
        for _ in range(length):
            fresh, to_query, to_label = rng.random(3)
            if fresh < restart:
                place = start
            queries = np.flatnonzero(Y[:, place])
            query = queries[int(to_query * len(queries))]
            labels = np.flatnonzero(Y[query])
            place = labels[int(to_label * len(labels))]
            counts[start, place] += 1
    return counts


@settings(deadline=None, max_examples=60)
@given(DENSE_CLICKS, DELTAS, st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.integers(1, 12))
def test_walk_targets_are_those_of_a_walk_step_by_step(dense, delta, restart, length):
    counts = walked_step_by_step(dense, length, restart, np.random.default_rng(5))
    ratio = np.minimum(counts / np.maximum(np.diag(counts), 1)[:, None], 1)
    expected = np.where(delta < ratio, ratio, 0)
    np.fill_diagonal(expected, 1)
    found = pairs_of(
        dense, seed=5, graph="random_walk", delta=delta, walk_length=length, restart=restart
    ).targets.toarray()
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_a_walk_visits_labels_as_often_as_its_transition_matrix_says():
    rng = np.random.default_rng(0)
    dense = (rng.random((12, 6)) < 0.4).astype(np.int8)
    dense[0] = 1
    hop = (dense / dense.sum(0)).T @ (dense / dense.sum(1, keepdims=True))
    # Σ_t p (1-p)^t M^(t+1), which the share of visits tends to.
    expected = 0.6 * hop @ np.linalg.inv(np.eye(6) - 0.4 * hop)
    reached = visits(click_graph(sp.csr_matrix(dense)), np.arange(6), 40_000, 0.6, rng)
    found = np.stack([np.bincount(row, minlength=6) for row in reached]) / reached.shape[1]
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_without_restart_a_walk_reaches_partners_of_partners_and_with_it_alone_it_does_not():
    chain = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
    wandering = pairs_of(chain, graph="random_walk", restart=0.0, delta=0.0).targets
    staying = pairs_of(chain, graph="random_walk", restart=1.0, delta=0.0).targets
    assert wandering[0].nnz == 4
    assert set(staying[0].indices) == {0, 1}


@settings(deadline=None, max_examples=60)
@given(DENSE_CLICKS, DELTAS, st.integers(1, 60))
def test_block_size_does_not_change_the_targets(dense, delta, limit):
    graph = click_graph(sp.csr_matrix(dense))
    labels = np.arange(dense.shape[1])
    makers = [
        lambda limit: conditional_rows(graph, labels, delta, limit),
        lambda limit: glas_rows(graph, labels, delta, limit),
        lambda limit: random_walk_rows(graph, labels, delta, 7, 0.5, np.random.default_rng(1), limit),
    ]
    for make in makers:
        small, whole = list(make(limit)), list(make(1 << 20))
        np.testing.assert_array_equal(np.concatenate([block for block, _ in small]), labels)
        assert len(whole) == 1
        joined = sp.vstack([rows for _, rows in small]).toarray()
        np.testing.assert_array_equal(joined, whole[0][1].toarray())


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 20))
def test_blocks_cover_everything_in_order_within_the_limit(weights, limit):
    found = list(blocks(np.array(weights, dtype=np.int64), limit))
    assert [i for block in found for i in range(block.start, block.stop)] == list(range(len(weights)))
    assert all(
        sum(weights[block]) <= limit or block.stop - block.start == 1 or sum(weights[block]) == 0
        for block in found
    )


def test_no_block_of_a_log_with_a_head_query_holds_more_pairs_than_asked_for():
    # One query with all 400 labels, each of which also has a query of its own: G has 160,000 pairs.
    labels = 400
    dense = np.vstack([np.ones((1, labels)), np.eye(labels)]).astype(np.int8)
    graph = click_graph(sp.csr_matrix(dense))
    sizes = [rows.nnz for _, rows in conditional_rows(graph, np.arange(labels), 0.1, 4_100)]
    assert max(sizes) <= 4_100
    assert sum(sizes) == labels * labels


def test_what_does_not_exceed_delta_is_dropped():
    # Label 0: ten queries, one of them with label 1: 1/10 is not above 0.1. Label 1 always comes with 0.
    dense = np.zeros((10, 2), dtype=np.int8)
    dense[:, 0] = 1
    dense[0, 1] = 1
    np.testing.assert_array_equal(pairs_of(dense, delta=0.1).targets.toarray(), [[1, 0], [1, 1]])
    found = pairs_of(dense, delta=0.09).targets.toarray()
    np.testing.assert_allclose(found, [[1, 0.1], [1, 1]], rtol=1e-6)


@pytest.mark.parametrize("graph", ["conditional", "random_walk", "glas", "self"])
def test_a_label_without_queries_belongs_to_itself_alone(graph):
    dense = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    own = 1 / (1 + np.exp(-1)) if graph == "glas" else 1.0
    found = pairs_of(dense, graph=graph).targets
    np.testing.assert_allclose(found[2].toarray(), [[0, 0, own]], rtol=1e-6)
    np.testing.assert_allclose(found.diagonal(), [own] * 3, rtol=1e-6)


@pytest.mark.parametrize("graph", ["conditional", "random_walk", "glas", "self"])
@pytest.mark.parametrize("shape", [(0, 3), (4, 1), (0, 0), (3, 0)])
def test_logs_without_queries_or_with_one_label(graph, shape):
    found = pairs_of(np.ones(shape), graph=graph)
    assert found.targets.shape == (shape[1], shape[1])
    assert found.targets.dtype == np.float32
    assert found.targets.nnz == shape[1]


def test_repeated_pairs_weights_and_stored_zeros_change_nothing_and_the_log_stays_as_it_was():
    once = sp.csr_matrix(np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]))
    # Row 0 has label 1 twice, and label 2 with weight 0; columns out of order.
    data = np.array([0.5, 7.0, 2.0, 0.0, 3.0, 4.0], dtype=np.float32)
    messy = sp.csr_matrix((data.copy(), np.array([1, 0, 1, 2, 2, 0]), np.array([0, 4, 6])), shape=(2, 3))
    config = GandalfConfig()
    expected = gandalf_pairs(once, config, np.random.default_rng(0)).targets
    found = gandalf_pairs(messy, config, np.random.default_rng(0)).targets
    np.testing.assert_array_equal(found.toarray(), expected.toarray())
    np.testing.assert_array_equal(messy.data, data)
    np.testing.assert_array_equal(messy.indices, [1, 0, 1, 2, 2, 0])


@settings(deadline=None, max_examples=80)
@given(DENSE_CLICKS, st.sampled_from(["conditional", "glas", "random_walk"]), st.integers(1, 6))
def test_most_keeps_a_texts_own_label_and_its_largest_targets(dense, graph, most):
    whole = pairs_of(dense, graph=graph, most=0).targets.toarray()
    cut = pairs_of(dense, graph=graph, most=most).targets.toarray()
    for label, (before, after) in enumerate(zip(whole, cut, strict=True)):
        assert (after > 0).sum() == min(most, (before > 0).sum())
        assert after[label] == before[label]
        np.testing.assert_array_equal(after[after > 0], before[after > 0])
        others = np.arange(len(before)) != label
        dropped = before[others & (after == 0)]
        assert dropped.max(initial=0) <= after[others & (after > 0)].min(initial=np.inf)


def test_of_equal_targets_most_keeps_the_rarer_labels():
    # Label 0 has one query, with all labels; 1 has three more queries, 2 has one more, 3 has two more.
    dense = np.zeros((7, 4), dtype=np.int8)
    dense[0] = 1
    dense[1:4, 1] = dense[4, 2] = dense[5:7, 3] = 1
    assert set(pairs_of(dense, most=3).targets[0].indices) == {0, 2, 3}


@given(st.integers(1, 200), st.floats(0.001, 1), st.sampled_from(["random", "tail"]), st.integers(0, 9))
def test_subsampling_takes_the_share_asked_for_without_repeats(labels, share, sampling, seed):
    frequency = np.random.default_rng(seed).integers(0, 5, labels)
    config = GandalfConfig(share=share, sampling=sampling)
    chosen = choose_labels(frequency, config, np.random.default_rng(seed))
    assert len(chosen) == max(1, round(share * labels))
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] >= 0
    assert chosen[-1] < labels


@given(st.integers(1, 200), st.floats(0.001, 1), st.integers(0, 9))
def test_tail_first_takes_no_label_that_is_more_frequent_than_one_left_out(labels, share, seed):
    frequency = np.random.default_rng(seed).zipf(1.5, labels)
    chosen = choose_labels(
        frequency, GandalfConfig(share=share, sampling="tail"), np.random.default_rng(seed)
    )
    left = np.setdiff1d(np.arange(labels), chosen)
    assert frequency[chosen].max() <= frequency[left].min(initial=np.iinfo(np.int64).max)


def test_equally_rare_labels_are_drawn_at_random():
    config = GandalfConfig(share=0.1, sampling="tail")
    frequency = np.ones(1000, dtype=np.int64)
    first, second = (choose_labels(frequency, config, np.random.default_rng(seed)) for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_sampled_labels_have_the_rows_of_the_whole_graph():
    dense = (np.random.default_rng(3).random((40, 20)) < 0.2).astype(np.int8)
    whole = pairs_of(dense).targets
    some = pairs_of(dense, share=0.4)
    assert some.targets.shape == (8, 20)
    np.testing.assert_array_equal(some.targets.toarray(), whole[some.labels].toarray())


@pytest.mark.parametrize("graph", ["conditional", "random_walk", "glas", "self"])
def test_equal_seeds_give_equal_pairs_and_other_seeds_other_samples(graph):
    dense = (np.random.default_rng(3).random((60, 40)) < 0.2).astype(np.int8)
    first, again, other = (pairs_of(dense, seed, graph=graph, share=0.5) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.labels, again.labels)
    np.testing.assert_array_equal(first.targets.toarray(), again.targets.toarray())
    assert not np.array_equal(first.labels, other.labels)


def test_nothing_but_training_pairs_can_be_handed_in():
    names = list(inspect.signature(targets_module.gandalf_pairs).parameters)
    assert names == ["clicks", "config", "rng"]
