"""What every encoder Φ offers to training and export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn


class Frozen(Enum):
    """Up to where an encoder does not train, so that what comes out there can be computed once and kept."""

    NOTHING = "nothing"
    LAYERS = "layers"  # activations above the frozen layers, one vector a token
    WHOLE = "whole"  # all of it (of the part that has layers): one vector a text


@dataclass(frozen=True)
class TextBatch:
    """Texts as an encoder takes them.

    Attributes:
        ids: int64 (n, t) token ids, padded.
        mask: int64 (n, t), 1 where there is a token.
        hidden: float (n, t, h) activations above the frozen layers, where those are cached; else None.
        pooled: float (n, h) vectors of a wholly frozen transformer, where those are cached; else None.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    hidden: torch.Tensor | None = None
    pooled: torch.Tensor | None = None


def joined(batches: Sequence[TextBatch]) -> TextBatch:
    """Batches of one kind, one below the other, padded to the longest text of all."""
    if len(batches) == 1:
        return batches[0]
    tokens = max(batch.ids.shape[1] for batch in batches)

    def padded(part: torch.Tensor) -> torch.Tensor:
        missing = tokens - part.shape[1]
        return nn.functional.pad(part, (0, 0) * (part.dim() - 2) + (0, missing)) if missing else part

    hidden = [padded(batch.hidden) for batch in batches if batch.hidden is not None]
    pooled = [batch.pooled for batch in batches if batch.pooled is not None]
    return TextBatch(
        torch.cat([padded(batch.ids) for batch in batches]),
        torch.cat([padded(batch.mask) for batch in batches]),
        torch.cat(hidden) if hidden else None,
        torch.cat(pooled) if pooled else None,
    )


class Encoder(nn.Module):
    """Φ: (ids, mask) to float (n, width).

    Attributes:
        width: of Φ(x).
        frozen: what of it can be computed once for a corpus.
    """

    width: int
    frozen = Frozen.NOTHING

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Φ(x), float (n, width), of int64 (n, t) token ids and mask."""
        raise TypeError(f"{type(self).__name__} is abstract")

    def encode(self, batch: TextBatch) -> torch.Tensor:
        """Φ(x) of a training batch, float (n, width)."""
        return self(batch.ids, batch.mask)

    def frozen_part(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """What may be kept of texts: float (n, t, h) for `Frozen.LAYERS`, (n, h) for `Frozen.WHOLE`."""
        raise TypeError(f"nothing of {type(self).__name__} is frozen")


def without_some(mask: torch.Tensor, probability: float) -> torch.Tensor:
    """A bool mask that leaves each token of an int64 (n, t) mask out with this probability."""
    kept = mask.bool()
    if probability > 0:
        kept = kept & (torch.rand(kept.shape, device=kept.device) >= probability)
    return kept


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of (n, t, h); zeros for a text without tokens."""
    weights = mask.to(values.dtype).unsqueeze(-1)
    return (values * weights).sum(1) / weights.sum(1).clamp(min=1.0)
