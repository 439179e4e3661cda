"""Cross-entropy of one head over all its local labels."""

from __future__ import annotations

import torch

from trainer.losses.rows import weighted_row_mean


def local_cross_entropy(scores: torch.Tensor, local: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
    """Mean over rows i of -1/|P_i| Σ_{p∈P_i} log( exp s_i,p_h / Σ_j exp s_ij ), p_h the local label of p.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, N_h) | of all local labels of the head, divided by the temperature |
    | local | int64 (m,) | local label of each pool label |
    | positives | float (n, m) | 1 (or a soft target) for a positive of the pool |

    With each label's own number as local label this is the softmax over all labels. Rows without positives
    count for nothing. Returns a scalar.
    """
    totals = positives.sum(1)
    chosen = scores.index_select(1, local)
    per_row = torch.logsumexp(scores, 1) - (positives * chosen).sum(1) / totals.clamp(min=1e-12)
    return weighted_row_mean(per_row, totals > 0, None)
