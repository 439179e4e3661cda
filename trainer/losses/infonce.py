"""InfoNCE as in DPR: one positive a row, and every other column is a negative, whatever it is."""

from __future__ import annotations

import torch

from trainer.losses.rows import weighted_row_mean


def infonce(
    scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over rows i of -log( exp s_ip / Σ_j exp s_ij ), p = argmax_j y_ij (the first of equals).

    The formula of one row is `pol`'s; what differs is p. There each positive is drawn in its turn, so that
    over many steps all are pulled and `supcon` is met in expectation. Here p is fixed by the targets: the
    row's further positives are negatives in every step, the false negatives of a loss that knows one
    positive a query. Which of equal positives is p follows from the order of the columns (a pool is in the
    order of the label ids), so this is DPR itself only where a row has one positive, as with β = 1 and few
    shared labels.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | similarities divided by the temperature |
    | positives | float (n, m) | y: 1 for a positive, 0 else; of soft targets in [0, 1] the highest counts |
    | weights | float (n,) or None | weight of each row |

    Rows without positives count for nothing. Returns a scalar.
    """
    target = positives.argmax(1, keepdim=True)
    per_row = torch.logsumexp(scores, 1) - scores.gather(1, target).squeeze(1)
    return weighted_row_mean(per_row, (positives > 0).any(1), weights)
