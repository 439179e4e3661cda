"""Pick-one-label: of each row one positive, drawn anew in every step, stands for all."""

from __future__ import annotations

import torch

from trainer.losses.rows import weighted_row_mean


def pol(scores: torch.Tensor, positives: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over rows i of -log( exp s_ip / Σ_j exp s_ij ), p drawn with probability y_ip / Σ_j y_ij (POL).

    The other positives stay in the denominator, as in the reduction's definition: the expectation over p is
    then exactly `supcon` (PAL-N), of which this is the one-sample estimate. The draw is torch's, from the
    generator of the scores' device, so processes that must agree seed it alike.

    | input | shape | meaning |
    | --- | --- | --- |
    | scores | float (n, m) | similarities divided by the temperature |
    | positives | float (n, m) | y: 1 for a positive, 0 else; soft targets in [0, 1] are allowed |
    | weights | float (n,) or None | weight of each row |

    Rows without positives count for nothing. Returns a scalar.
    """
    has_positive = (positives > 0).any(1)
    # A row without positives must still draw something; its loss is not counted.
    drawn = torch.multinomial(torch.where(has_positive[:, None], positives, 1.0), 1)
    per_row = torch.logsumexp(scores, 1) - scores.gather(1, drawn).squeeze(1)
    return weighted_row_mean(per_row, has_positive, weights)
