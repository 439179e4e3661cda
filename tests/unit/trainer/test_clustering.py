from __future__ import annotations

import numpy as np
import pytest

from trainer.clustering import balanced_clusters, epoch_batches


def unit_vectors(n: int, d: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 257, 513, 1000])
@pytest.mark.parametrize("size", [2, 3, 16, 256, 5000])
def test_clusters_are_balanced_and_hold_everything(n, size):
    clusters = balanced_clusters(unit_vectors(n, 8, n), size, np.random.default_rng(0))
    sizes = np.bincount(clusters)
    assert sizes.sum() == len(clusters) == n
    assert sizes.max() <= size
    assert sizes.max() - sizes.min() <= 1
    # Halving stops as soon as it may.
    assert 2 * sizes.max() + 2 > min(size, n)


def test_size_one_gives_each_query_its_own_cluster():
    clusters = balanced_clusters(unit_vectors(50, 4, 0), 1, np.random.default_rng(0))
    assert sorted(clusters) == list(range(50))


def test_deterministic_in_the_seed():
    x = unit_vectors(300, 16, 3)
    first, again = (balanced_clusters(x, 32, np.random.default_rng([5, 1])) for _ in range(2))
    assert np.array_equal(first, again)
    other = balanced_clusters(x, 32, np.random.default_rng([6, 1]))
    assert not np.array_equal(first, other)


def test_similar_vectors_share_a_cluster():
    rng = np.random.default_rng(0)
    centres = np.eye(8, dtype=np.float32)
    topic = np.repeat(np.arange(8), 32)
    x = centres[topic] + 0.05 * rng.standard_normal((256, 8)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    shuffled = rng.permutation(256)
    clusters = balanced_clusters(x[shuffled], 64, np.random.default_rng(1))
    within = np.mean([np.mean(x[shuffled][clusters == c] @ x[shuffled][clusters == c].T) for c in range(4)])
    assert within > 0.4
    assert abs(np.mean(x @ x.T)) < 0.2


def test_identical_vectors_are_still_split_evenly():
    x = np.tile(unit_vectors(1, 8, 0), (100, 1))
    assert np.bincount(balanced_clusters(x, 25, np.random.default_rng(0))).tolist() == [25, 25, 25, 25]


@pytest.mark.parametrize(("n", "cluster", "batch"), [(1, 1, 8), (100, 1, 32), (100, 7, 32), (513, 64, 64)])
def test_an_epoch_holds_every_query_once(n, cluster, batch):
    clusters = balanced_clusters(unit_vectors(n, 8, 1), cluster, np.random.default_rng(0))
    batches = epoch_batches(clusters, batch, np.random.default_rng(2))
    assert sorted(np.concatenate(batches)) == list(range(n))
    assert len(batches) == -(-n // batch)
    sizes = [len(rows) for rows in batches]
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1


def test_batches_join_whole_clusters_where_sizes_match():
    clusters = balanced_clusters(unit_vectors(256, 8, 1), 16, np.random.default_rng(0))
    for rows in epoch_batches(clusters, 64, np.random.default_rng(2)):
        assert np.bincount(clusters[rows], minlength=16).tolist().count(16) == 4


def test_the_order_of_an_epoch_depends_on_its_random_numbers():
    clusters = np.arange(64, dtype=np.int32)
    one, same, other = (epoch_batches(clusters, 8, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(np.concatenate(one), np.concatenate(other))
