"""Binary cross-entropy over the label pool: the auxiliary loss of the classifier."""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from trainer.losses.rows import weighted_row_mean


def bce(scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over rows i of 1/m Σ_j -[ y_ij log σ(s_ij) + (1-y_ij) log(1-σ(s_ij)) ]: OvA on the pool.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | logits |
    | positives | float (n, m) | targets in [0, 1] |
    | weights | float (n,) or None | weight of each row |

    Every row counts, with or without positives. Returns a scalar.
    """
    per_row = binary_cross_entropy_with_logits(scores, positives, reduction="none").mean(1)
    return weighted_row_mean(per_row, torch.ones_like(per_row, dtype=torch.bool), weights)
