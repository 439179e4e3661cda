"""Decoupled softmax: a positive competes with the negatives only, never with other positives."""

from __future__ import annotations

import torch

from trainer.losses.rows import weighted_row_mean

_MASKED = -1e30


def decoupled(
    scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over rows i of -1/|P_i| Σ_{p∈P_i} log( exp s_ip / (exp s_ip + Σ_{n∉P_i} exp s_in) ).

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | similarities divided by the temperature |
    | positives | float (n, m) | 1 for a positive, 0 else; a soft target weighs its term |
    | weights | float (n,) or None | weight of each row |

    Rows without positives count for nothing; a row whose every column is a positive has loss 0.
    Returns a scalar.
    """
    totals = positives.sum(1)
    negatives = scores.masked_fill(positives > 0, _MASKED)
    against = torch.logsumexp(negatives, 1, keepdim=True)
    terms = torch.nn.functional.softplus(against - scores)
    per_row = (positives * terms).sum(1) / totals.clamp(min=1e-12)
    return weighted_row_mean(per_row, totals > 0, weights)
