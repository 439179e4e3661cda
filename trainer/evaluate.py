"""Metrics of a model in training by exact search: each head, both joined, and wide heads' re-scoring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from trainer.distributed import Workers
from trainer.metrics import by_frequency, evaluate_ranking
from trainer.mining import exact_top_k
from trainer.model import HeadVectors, normalised

KS = (1, 3, 5)
RECALL_KS = (10, 100)
RESCORED = 100
_VALUES_AT_ONCE = 16_000_000


def served_view(views: dict[str, Any]) -> str:
    """Which of the views a bundle of this model serves."""
    order = ("rescored", "concatenation", "dual_encoder", "classifier")
    return next(view for view in order if view in views)


def rankings(
    queries: Sequence[HeadVectors],
    labels: Sequence[HeadVectors],
    tables: Sequence[torch.Tensor],
    filtered: sp.csr_matrix | None = None,
) -> dict[str, np.ndarray]:
    """The 100 best labels of each query by each view, int64 (n, <= 100), best first, -1 where none is left.

    Views of the narrow heads are `dual_encoder`, `classifier` and, of both, `concatenation`. Wide heads add
    `wide`, their own exact ranking, and `rescored`, the narrow view's best in the wide heads' order.

    Args:
        queries: vectors of n queries by each pair of heads.
        labels: vectors of the L labels, likewise.
        tables: Ψ of each pair, float (L, c); none where the classifier is off.
        filtered: CSR (n, L) of the pairs that are taken out of rankings; None for none.
    """
    joined = []
    views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for level, (query, label) in enumerate(zip(queries, labels, strict=True)):
        pairs = {}
        if query.phi_d.shape[1]:
            pairs["dual_encoder"] = (query.phi_d, label.phi_d)
        if tables:
            psi = normalised(tables[level].to(query.phi_c.device))
            pairs["classifier"] = (normalised(query.phi_c), psi)
        x, z = (torch.cat(parts, 1) for parts in zip(*pairs.values(), strict=True))
        joined.append((x, z))
        if level == 0:
            views = pairs | ({"concatenation": (x, z)} if len(pairs) == 2 else {})
        else:
            views["wide"] = (x, z)
    found = {view: exact_top_k(x, z, max(RECALL_KS), excluded=filtered) for view, (x, z) in views.items()}
    if len(joined) == 2:
        narrow = exact_top_k(*joined[0], RESCORED, excluded=filtered)
        found["rescored"] = reordered(*joined[1], narrow)
    return found


def shared_rankings(
    queries: Sequence[HeadVectors],
    labels: Sequence[HeadVectors],
    tables: Sequence[torch.Tensor],
    workers: Workers,
    filtered: sp.csr_matrix | None = None,
) -> dict[str, np.ndarray]:
    """`rankings`: each of several processes searches for its share of the queries, all end with the whole."""
    shares = workers.shares(len(queries[0].phi_d))
    own = [HeadVectors(*(part[shares[workers.rank]] for part in pair)) for pair in queries]
    sizes = [share.stop - share.start for share in shares]
    out = None if filtered is None else filtered[shares[workers.rank]]
    return {
        view: workers.gather(torch.from_numpy(top), sizes).numpy()
        for view, top in rankings(own, labels, tables, out).items()
    }


def reordered(queries: torch.Tensor, labels: torch.Tensor, candidates: np.ndarray) -> np.ndarray:
    """Each query's candidates, int64 (n, c), by falling inner product of these vectors, (n, d) and (L, d).

    A candidate of -1 stays last.
    """
    ordered = np.empty_like(candidates)
    block = max(1, _VALUES_AT_ONCE // max(1, candidates.shape[1] * queries.shape[1]))
    for start in range(0, len(candidates), block):
        part = torch.from_numpy(candidates[start : start + block]).to(labels.device)
        scores = torch.einsum("nd,ncd->nc", queries[start : start + block], labels[part.clamp(min=0)])
        scores = scores.masked_fill(part < 0, -torch.inf)
        order = torch.argsort(scores, dim=1, descending=True, stable=True)
        ordered[start : start + block] = torch.gather(part, 1, order).cpu().numpy()
    return ordered


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
