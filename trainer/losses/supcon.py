"""PAL-N over the batch's positives: the paper's PSL loss with the cross-entropy as multi-class loss."""

from __future__ import annotations

import torch

from trainer.losses.rows import weighted_row_mean


def supcon(
    scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over rows i of -1/|P_i| Σ_{p∈P_i} log( exp s_ip / Σ_j exp s_ij ) (UniDEC, L_PSL).

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | similarities divided by the temperature |
    | positives | float (n, m) | 1 for a positive, 0 else; soft targets in [0, 1] are allowed |
    | weights | float (n,) or None | weight of each row |

    Rows without positives count for nothing. Returns a scalar.
    """
    totals = positives.sum(1)
    log_partition = torch.logsumexp(scores, 1)
    per_row = log_partition - (positives * scores).sum(1) / totals.clamp(min=1e-12)
    return weighted_row_mean(per_row, totals > 0, weights)
