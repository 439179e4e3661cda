"""What all losses share: how rows are averaged."""

from __future__ import annotations

import torch


def weighted_row_mean(
    per_row: torch.Tensor, has_positive: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Mean over the rows that have a positive, weighted by `weights` (n,); 0 where none has one."""
    share = has_positive.to(per_row.dtype)
    if weights is not None:
        share = share * weights
    return (per_row * share).sum() / share.sum().clamp(min=torch.finfo(per_row.dtype).tiny)
