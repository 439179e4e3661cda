"""The two heads over one encoder, narrow and wide, and the vectors that are served (UniDEC, section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.encoders.base import Encoder, TextBatch
from trainer.encoders.build import empty_encoder, new_encoder


class HeadVectors(NamedTuple):
    """What a pair of heads makes of n texts.

    Attributes:
        phi_d: Φ_D, float (n, d), unit length; d = 0 where that head is switched off.
        phi_c: Φ_C, float (n, c), of any length; c = 0 likewise.
    """

    phi_d: torch.Tensor
    phi_c: torch.Tensor

    def served(self) -> torch.Tensor:
        """[Φ_D ⊕ N(Φ_C)], float (n, d + c): the retrieval vector of a query."""
        parts = [part for part in (self.phi_d, normalised(self.phi_c)) if part.shape[1]]
        return torch.cat(parts, dim=1)


class HeadPair(nn.Module):
    """Φ_D(x) = N(g1(Φ(x))) and Φ_C(x) = g2(Φ(x)); g1 = Linear, Tanh, Dropout; g2 = Linear, Dropout.

    Args:
        width: of Φ.
        d: width of Φ_D; 0 for none.
        c: width of Φ_C; 0 for none.
        dropout: of both heads, in training.
    """

    def __init__(self, width: int, d: int, c: int, dropout: float):
        super().__init__()
        self.d, self.c = d, c
        self.g1 = nn.Sequential(nn.Linear(width, d), nn.Tanh(), nn.Dropout(dropout)) if d else None
        self.g2 = nn.Sequential(nn.Linear(width, c), nn.Dropout(dropout)) if c else None

    def forward(self, phi: torch.Tensor, *, classifier: bool = True) -> HeadVectors:
        """Both heads' vectors of Φ(x), float (n, width); without Φ_C if `classifier` is false."""
        none = phi[:, :0]
        phi_d = none if self.g1 is None else normalised(self.g1(phi))
        phi_c = none if self.g2 is None or not classifier else self.g2(phi)
        return HeadVectors(phi_d, phi_c)


class DualHeadModel(nn.Module):
    """Φ with one pair of heads (narrow: what is searched), or two (and wide: what re-scores).

    Args:
        encoder: Φ.
        widths: (Φ_D, Φ_C) widths of each pair, the narrow one first.
        head_dropout: of all heads, in training.
    """

    def __init__(self, encoder: Encoder, widths: Sequence[tuple[int, int]], head_dropout: float):
        super().__init__()
        self.encoder = encoder
        self.widths = tuple(widths)
        self.heads = nn.ModuleList(HeadPair(encoder.width, d, c, head_dropout) for d, c in widths)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[HeadVectors, ...]:
        """Each pair's vectors of int64 (n, t) token ids and mask."""
        phi = self.encoder(input_ids, attention_mask)
        return tuple(pair(phi) for pair in self.heads)

    def heads_of(self, phi: torch.Tensor, *, classifier: bool = True) -> tuple[HeadVectors, ...]:
        """Each pair's vectors of Φ(x), float (n, width); without Φ_C if `classifier` is false."""
        return tuple(pair(phi, classifier=classifier) for pair in self.heads)

    def encode(self, batch: TextBatch, *, classifier: bool = True) -> tuple[HeadVectors, ...]:
        """Each pair's vectors of a training batch; without Φ_C if `classifier` is false."""
        return self.heads_of(self.encoder.encode(batch), classifier=classifier)

    def query_vectors(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """[Φ_D(x) ⊕ N(Φ_C(x))] of each pair, float (n, dim): what is searched with, and what re-scores."""
        return tuple(vectors.served() for vectors in self(input_ids, attention_mask))


def normalised(x: torch.Tensor) -> torch.Tensor:
    """N(x): each row at unit length; a zero row stays zero."""
    return nn.functional.normalize(x, dim=1, eps=1e-12)


def widths_of(config: TrainConfig) -> list[tuple[int, int]]:
    """(Φ_D, Φ_C) widths of the pairs of heads a configuration asks for."""
    dims = [config.dim, config.wide_dim] if config.wide_dim else [config.dim]
    return [config.split_width(dim) for dim in dims]


def new_model(config: TrainConfig) -> tuple[DualHeadModel, dict[str, Any]]:
    """A model with pretrained encoder and fresh heads, and the architecture `empty_model` needs.

    Raises:
        ConfigError: the pretrained encoder can't be loaded or does not fit the configuration.
    """
    encoder, architecture = new_encoder(config.encoder)
    return DualHeadModel(encoder, widths_of(config), config.head_dropout), architecture


def empty_model(config: TrainConfig, architecture: dict[str, Any]) -> DualHeadModel:
    """A model of the right shape for a checkpoint's weights; reads nothing from disk or hub."""
    return DualHeadModel(empty_encoder(config.encoder, architecture), widths_of(config), config.head_dropout)
