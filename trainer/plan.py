"""What is decided every τ epochs: which queries share a batch, and which labels are hard for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch

from trainer.clustering import balanced_clusters
from trainer.config import BatchConfig
from trainer.distributed import Workers
from trainer.mining import mine_hard_negatives

# Streams of the run's random numbers, so that each use has its own and none depends on how many were drawn.
CLUSTER_STREAM, EPOCH_STREAM, STEP_STREAM, INIT_STREAM, CODE_STREAM, GANDALF_STREAM = range(6)


def stream(seed: int, *place: int) -> np.random.Generator:
    """The random numbers of one place (stream, epoch, step) of a run: the same whenever it is reached."""
    return np.random.default_rng([seed, *place])


@dataclass(frozen=True)
class Plan:
    """Clusters and hard negatives of τ epochs.

    Attributes:
        clusters: int32 (N,), cluster of each training query.
        hard: int32 (N, η·τ), H_i, -1 where too few labels were left.
    """

    clusters: np.ndarray
    hard: np.ndarray


def make_plan(
    queries: torch.Tensor,
    labels: torch.Tensor,
    targets: sp.csr_matrix,
    config: BatchConfig,
    seed: int,
    epoch: int,
    threads: int,
    workers: Workers | None = None,
) -> Plan:
    """Cluster the queries and mine their hard negatives (Algorithm 1, `e % τ is 0`).

    Of several processes the first one clusters, all mine, and all end with the same plan.

    Args:
        queries: Φ_D of the training queries, float (N, d); N(Φ_C) where the classifier trains alone.
        labels: Φ_D of all labels, float (L, d); N(Ψ) likewise.
        targets: CSR (N, L) of the pairs that are no negatives: those of the training set, at least.
        config: batch sizes, η, τ.
        seed: the run's.
        epoch: the epoch that begins.
        threads: CPU threads; 0 for all cores.
        workers: the processes.
    """
    workers = workers or Workers()
    rng = stream(seed, CLUSTER_STREAM, epoch)
    clusters = workers.first(lambda: balanced_clusters(queries.cpu().numpy(), config.cluster_size, rng))
    keep = min(config.hard_negatives * config.refresh, len(labels))
    if keep == 0:
        return Plan(clusters, np.zeros((len(clusters), 0), dtype=np.int32))
    hard = mine_hard_negatives(queries, labels, targets, keep, config.exact_mining_up_to, threads, workers)
    return Plan(clusters, hard)
