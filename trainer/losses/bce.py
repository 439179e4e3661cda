"""Binary cross-entropy, one versus all: averaged over a pool, or summed over the labels."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from trainer.losses.rows import weighted_row_mean


def bce(scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over rows i of 1/m Σ_j -[ y_ij log σ(s_ij) + (1-y_ij) log(1-σ(s_ij)) ]: the auxiliary loss.

    The mean over the m columns keeps it of the order of the multi-class loss it is added to, however large
    the pool is.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | logits |
    | positives | float (n, m) | targets in [0, 1] |
    | weights | float (n,) or None | weight of each row |

    Every row counts, with or without positives. Returns a scalar.
    """
    per_row = binary_cross_entropy_with_logits(scores, positives, reduction="none").mean(1)
    return weighted_row_mean(per_row, torch.ones_like(per_row, dtype=torch.bool), weights)


def summed_bce(
    scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over rows i of Σ_j -[ y_ij log σ(t_ij) + (1-y_ij) log(1-σ(t_ij)) ], t_ij = s_ij - log m.

    Renee's loss over all labels. Summed, not averaged, over the columns: a positive's pull on its row of Ψ,
    (σ(t_ij) - y_ij) / n, is then about the same among 10² labels and among 10⁵, where a mean would shrink it
    a thousandfold, below what the other terms of the loss and the optimiser's ε leave visible.

    The shift is not Renee's: a score of 0 then says that about one of the m labels is right, not every other
    one. It changes no ranking, and a model that begins at label texts would spend its training on pushing m
    labels below 0: see `bench/compare.md`.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | logits, up to the shift |
    | positives | float (n, m) | targets in [0, 1] |
    | weights | float (n,) or None | weight of each row |

    Every row counts, with or without positives. Returns a scalar.
    """
    shifted = scores - math.log(max(scores.shape[1], 1))
    per_row = binary_cross_entropy_with_logits(shifted, positives, reduction="none").sum(1)
    return weighted_row_mean(per_row, torch.ones_like(per_row, dtype=torch.bool), weights)
