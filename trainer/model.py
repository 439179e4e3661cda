"""The two heads over one encoder, and the vectors that are served (UniDEC, section 2.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.config import BagEncoderConfig, TrainConfig, TransformerEncoderConfig
from trainer.encoders import pretrained
from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import Encoder, TextBatch
from trainer.encoders.transformer import TransformerEncoder, check_split


class DualHeadModel(nn.Module):
    """Φ_D(x) = N(g1(Φ(x))) and Φ_C(x) = g2(Φ(x)); g1 = Linear, Tanh, Dropout; g2 = Linear, Dropout.

    Args:
        encoder: Φ.
        dim: width of the served vector; each head has half of it.
        head_dropout: of both heads, in training.
    """

    def __init__(self, encoder: Encoder, dim: int, head_dropout: float):
        super().__init__()
        self.encoder = encoder
        self.head_width = dim // 2
        self.g1 = nn.Sequential(nn.Linear(encoder.width, dim // 2), nn.Tanh(), nn.Dropout(head_dropout))
        self.g2 = nn.Sequential(nn.Linear(encoder.width, dim // 2), nn.Dropout(head_dropout))

    def heads(self, phi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Φ_D (unit length) and Φ_C (any length), float (n, dim/2) each, from Φ(x)."""
        return normalised(self.g1(phi)), self.g2(phi)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Φ_D and Φ_C of int64 (n, t) token ids and mask."""
        return self.heads(self.encoder(input_ids, attention_mask))

    def encode(self, batch: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Φ_D and Φ_C of a training batch."""
        return self.heads(self.encoder.encode(batch))

    def query_vectors(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[Φ_D(x) ⊕ N(Φ_C(x))], float (n, dim): what is searched with."""
        phi_d, phi_c = self(input_ids, attention_mask)
        return torch.cat([phi_d, normalised(phi_c)], dim=1)


def normalised(x: torch.Tensor) -> torch.Tensor:
    """N(x): each row at unit length; a zero row stays zero."""
    return nn.functional.normalize(x, dim=1, eps=1e-12)


def new_model(config: TrainConfig) -> tuple[DualHeadModel, dict[str, Any]]:
    """A model with pretrained encoder and fresh heads, and the architecture `empty_model` needs.

    Raises:
        ConfigError: the pretrained encoder can't be loaded or does not fit the configuration.
    """
    encoder: Encoder
    if isinstance(config.encoder, BagEncoderConfig):
        words = pretrained.load_word_vectors(config.encoder.pretrained)
        architecture: dict[str, Any] = {"vocabulary": words.shape[0], "width": words.shape[1]}
        encoder = _bag(config.encoder, architecture)
        encoder.words.weight.data.copy_(words)
    else:
        architecture = pretrained.transformer_config(config.encoder.pretrained)
        encoder = TransformerEncoder(
            pretrained.load_transformer(config.encoder.pretrained),
            config.encoder.pooling,
            config.encoder.frozen_layers,
        )
        if config.encoder.frozen_layers:
            check_split(encoder)
    return DualHeadModel(encoder, config.dim, config.head_dropout), architecture


def empty_model(config: TrainConfig, architecture: dict[str, Any]) -> DualHeadModel:
    """A model of the right shape for a checkpoint's weights; reads nothing from disk or hub."""
    encoder: Encoder
    if isinstance(config.encoder, BagEncoderConfig):
        encoder = _bag(config.encoder, architecture)
    else:
        encoder = _empty_transformer(config.encoder, architecture)
    return DualHeadModel(encoder, config.dim, config.head_dropout)


def _bag(config: BagEncoderConfig, architecture: dict[str, Any]) -> BagEncoder:
    return BagEncoder(architecture["vocabulary"], architecture["width"], config.dropout, config.word_dropout)


def _empty_transformer(config: TransformerEncoderConfig, architecture: dict[str, Any]) -> TransformerEncoder:
    from transformers import AutoConfig, AutoModel

    fields = {name: value for name, value in architecture.items() if name != "model_type"}
    shape = AutoConfig.for_model(architecture["model_type"], **fields)
    model = AutoModel.from_config(shape, attn_implementation="eager").float()
    return TransformerEncoder(model, config.pooling, config.frozen_layers)
