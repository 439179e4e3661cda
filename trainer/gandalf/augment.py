"""The training set with label texts in it."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from trainer.config import GandalfConfig
from trainer.corpus import TextSource
from trainer.gandalf.source import JoinedSource, SelectedSource
from trainer.gandalf.targets import GandalfPairs, gandalf_pairs


def augment(clicks: sp.csr_matrix, pairs: GandalfPairs) -> sp.csr_matrix:
    """D ∪ Z: targets of the log's queries, then of the label texts, CSR (N + M, L) float32.

    Args:
        clicks: CSR (N, L), the training pairs. A clicked pair's target is 1 whatever its weight.
        pairs: the label texts.
    """
    real = sp.csr_matrix(clicks, copy=True)
    real.sum_duplicates()
    real.eliminate_zeros()
    real.data = np.ones(real.nnz, dtype=np.float32)
    return sp.vstack([real, pairs.targets], format="csr", dtype=np.float32)


def with_label_texts(
    queries: TextSource,
    labels: TextSource,
    clicks: sp.csr_matrix,
    config: GandalfConfig,
    rng: np.random.Generator,
) -> tuple[TextSource, sp.csr_matrix]:
    """What training reads instead of the log's queries and clicks.

    Args:
        queries: texts of the N training queries.
        labels: texts of the L labels.
        clicks: CSR (N, L), the training pairs and no others.
        config: see GandalfConfig; `enabled` is the caller's to read.
        rng: of this run's label graph.

    Returns:
        The texts of N + M queries (M with `config.alone`) and their targets, CSR float32.
    """
    pairs = gandalf_pairs(clicks, config, rng)
    if config.alone:
        return SelectedSource(labels, pairs.labels), pairs.targets
    return JoinedSource(queries, labels, pairs.labels), augment(clicks, pairs)
