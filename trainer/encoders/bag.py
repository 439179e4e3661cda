"""The papers' frugal encoder: a bag of word-piece vectors with ASTEC's residual block."""

from __future__ import annotations

import torch
from torch import nn

from trainer.encoders.base import Encoder, TextBatch, masked_mean, without_some


class BagEncoder(Encoder):
    """Φ(x) = v + ReLU(W v), v the mean of the text's word-piece vectors; a text without tokens has v = 0.

    The word vectors take sparse gradients: a step touches only the batch's tokens.

    Args:
        vocabulary: V, word pieces.
        width: h, of the vectors.
        dropout: on v, in training.
        word_dropout: probability of leaving a token out, in training.
    """

    def __init__(self, vocabulary: int, width: int, dropout: float, word_dropout: float):
        super().__init__()
        self.width = width
        self.word_dropout = word_dropout
        self.words = nn.Embedding(vocabulary, width, sparse=True)
        self.residual = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.residual.weight)
        nn.init.zeros_(self.residual.bias)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Φ(x), float (n, width), of int64 (n, t) token ids and mask."""
        return self._block(masked_mean(self.words(ids), mask))

    def encode(self, batch: TextBatch) -> torch.Tensor:
        """Φ(x) of a training batch; one fused bag instead of a padded (n, t, h) tensor."""
        mask = without_some(batch.mask, self.word_dropout if self.training else 0.0)
        lengths = mask.sum(1)
        offsets = torch.cumsum(lengths, 0) - lengths
        v = nn.functional.embedding_bag(batch.ids[mask], self.words.weight, offsets, mode="mean", sparse=True)
        return self._block(v)

    def _block(self, v: torch.Tensor) -> torch.Tensor:
        v = self.dropout(v)
        return v + torch.relu(self.residual(v))
