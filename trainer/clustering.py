"""Balanced hierarchical 2-means over the queries: similar queries share a batch (section 2.3.2)."""

from __future__ import annotations

import numpy as np

_ITERATIONS = 8


def _halve(vectors: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the two halves (sizes differ by at most one) of float (n, d) vectors."""
    n = len(vectors)
    centres = vectors[rng.choice(n, size=2, replace=False)]
    half = n // 2
    lower = np.arange(half)
    for _ in range(_ITERATIONS):
        preference = vectors @ (centres[0] - centres[1])
        order = np.argpartition(preference, half)
        if np.array_equal(lower, order[:half]):
            break
        lower = order[:half]
        centres = np.stack([vectors[order[half:]].mean(0), vectors[lower].mean(0)])
    return order[:half], order[half:]


def balanced_clusters(vectors: np.ndarray, cluster_size: int, rng: np.random.Generator) -> np.ndarray:
    """Cluster id of each vector: at most `cluster_size` members each, sizes differ by at most one.

    Args:
        vectors: float32 (n, d), unit length.
        cluster_size: largest cluster allowed; 1 gives every query its own cluster (random batches).
        rng: the source of all that is random.

    Returns:
        int32 (n,), ids from 0.
    """
    n = len(vectors)
    if cluster_size == 1:
        return np.arange(n, dtype=np.int32)
    # Every cluster is the outcome of equally many halvings; stopping each as soon as it fits would leave
    # some half as large as others.
    parts = [np.arange(n)]
    while -(-n // len(parts)) > cluster_size:
        parts = [members[half] for members in parts for half in _halve(vectors[members], rng)]
    clusters = np.empty(n, dtype=np.int32)
    for cluster, members in enumerate(parts):
        clusters[members] = cluster
    return clusters


def epoch_batches(clusters: np.ndarray, batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every query once: whole clusters in random order, cut into batches of nearly equal size.

    Args:
        clusters: int32 (n,), from `balanced_clusters`.
        batch_size: largest batch.
        rng: the source of the order.

    Returns:
        int64 arrays of query rows.
    """
    position = rng.permutation(int(clusters.max(initial=0)) + 1)
    order = np.argsort(position[clusters], kind="stable")
    return np.array_split(order, max(1, -(-len(order) // batch_size)))
