"""Metrics of a model in training: Φ_D, Φ_C and their concatenation, by exact search."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch

from trainer.metrics import by_frequency, evaluate_ranking
from trainer.mining import exact_top_k
from trainer.model import normalised

KS = (1, 3, 5)
RECALL_KS = (10, 100)
VIEWS = ("dual_encoder", "classifier", "concatenation")


def rankings(
    query_d: torch.Tensor, query_c: torch.Tensor, label_d: torch.Tensor, psi: torch.Tensor
) -> dict[str, np.ndarray]:
    """The 100 best labels of each query by each view, int64 (n, <= 100), best first.

    Args:
        query_d: Φ_D of the queries, float (n, d/2).
        query_c: Φ_C of the queries, float (n, d/2).
        label_d: Φ_D of the labels, float (L, d/2).
        psi: Ψ, float (L, d/2).
    """
    query_c, psi = normalised(query_c), normalised(psi)
    pairs = {
        "dual_encoder": (query_d, label_d),
        "classifier": (query_c, psi),
        "concatenation": (torch.cat([query_d, query_c], 1), torch.cat([label_d, psi], 1)),
    }
    return {view: exact_top_k(*pairs[view], max(RECALL_KS)) for view in VIEWS}


def metrics_of(
    found: dict[str, np.ndarray], truth: sp.csr_matrix, propensity: np.ndarray
) -> dict[str, dict[str, float]]:
    """P@k, PSP@k, nDCG@k, recall@k of each view, in percent."""
    return {view: evaluate_ranking(top, truth, KS, RECALL_KS, propensity) for view, top in found.items()}


def metrics_by_frequency(
    found: dict[str, np.ndarray], truth: sp.csr_matrix, label_counts: np.ndarray, propensity: np.ndarray
) -> dict[str, dict[str, dict[str, float]]]:
    """The same by head, torso and tail labels, for each view."""
    return {
        view: by_frequency(top, truth, label_counts, KS, RECALL_KS, propensity) for view, top in found.items()
    }
