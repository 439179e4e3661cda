"""What every encoder Φ offers to training and export."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TextBatch:
    """Texts as an encoder takes them.

    Attributes:
        ids: int64 (n, t) token ids, padded.
        mask: int64 (n, t), 1 where there is a token.
        hidden: float (n, t, h) activations above the frozen layers, where those are cached; else None.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    hidden: torch.Tensor | None = None


class Encoder(nn.Module):
    """Φ: (ids, mask) to float (n, width)."""

    width: int

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Φ(x), float (n, width), of int64 (n, t) token ids and mask."""
        raise TypeError(f"{type(self).__name__} is abstract")

    def encode(self, batch: TextBatch) -> torch.Tensor:
        """Φ(x) of a training batch, float (n, width)."""
        return self(batch.ids, batch.mask)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of (n, t, h); zeros for a text without tokens."""
    weights = mask.to(values.dtype).unsqueeze(-1)
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1.0)
