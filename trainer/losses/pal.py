"""Pick-all-labels: every positive of a row is a softmax term of its own, none is averaged away."""

from __future__ import annotations

import torch

from trainer.losses.rows import weighted_row_mean


def pal(scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over rows i of -Σ_{p∈P_i} y_ip log( exp s_ip / Σ_j exp s_ij ) (PAL).

    `supcon` (PAL-N) is this with each row divided by Σ_p y_ip, so here a row counts in proportion to its
    positives: queries with many of them, and the head labels they share, dominate.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | similarities divided by the temperature |
    | positives | float (n, m) | y: 1 for a positive, 0 else; soft targets in [0, 1] are allowed |
    | weights | float (n,) or None | weight of each row |

    Rows without positives count for nothing. Returns a scalar.
    """
    terms = torch.logsumexp(scores, 1, keepdim=True) - scores
    return weighted_row_mean((positives * terms).sum(1), (positives > 0).any(1), weights)
