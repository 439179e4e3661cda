"""NGAME's triplet margin loss with the hardest negatives of the batch."""

from __future__ import annotations

import torch

from trainer.losses.rows import weighted_row_mean

MARGIN = 0.3
HARDEST = 3
_MASKED = -1e30


def triplet(
    scores: torch.Tensor,
    positives: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    margin: float = MARGIN,
    hardest: int = HARDEST,
) -> torch.Tensor:
    """Mean over rows i of 1/Σ_p y_ip Σ_{p∈P_i} y_ip 1/|N_i| Σ_{n∈N_i} max(0, γ - s_ip + s_in).

    N_i holds the `hardest` highest columns of the row that are no positives, or fewer where there are not so
    many. NGAME has one positive a query; with one the formula is NGAME's.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | similarities divided by the temperature |
    | positives | float (n, m) | y: 1 for a positive, 0 else; a soft target weighs its term |
    | weights | float (n,) or None | weight of each row |
    | margin | float | γ in the unit of the scores: 0.3 for cosines, 0.3 / temperature for scores so divided |
    | hardest | int | negatives a row |

    Rows without positives count for nothing; a row whose every column is a positive has loss 0.
    Returns a scalar.
    """
    totals = positives.sum(1)
    is_positive = positives > 0
    masked = scores.masked_fill(is_positive, _MASKED)
    # A masked column is so far below any positive that its hinge and gradient are 0.
    negatives = masked.topk(min(hardest, scores.shape[1]), dim=1).values
    counts = (~is_positive).sum(1).clamp(min=1, max=hardest)
    # Positives are few: pairs of them with negatives are (positives, hardest), not (n, m, hardest).
    row, column = is_positive.nonzero(as_tuple=True)
    hinges = (margin - scores[row, column, None] + negatives[row]).relu().sum(1)
    terms = positives[row, column] * hinges / (counts * totals.clamp(min=1e-12))[row]
    per_row = torch.zeros_like(totals).index_add(0, row, terms)
    return weighted_row_mean(per_row, totals > 0, weights)
