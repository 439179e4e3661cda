"""InceptionXML's idea: convolutions of several widths over the word-piece vectors of a short text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import pad

from trainer.encoders.base import Encoder, TextBatch, masked_mean, without_some


class InceptionEncoder(Encoder):
    """Φ(x) = v + ReLU(W v), v = mean_i e_i + P [u_w1 ⊕ u_w2 ⊕ ...], u_w = mean_i ReLU(conv_w(e)_i).

    e is the text's word-piece vectors with zeros on both sides, conv_w spans w of them around token i, and
    the means are over the text's tokens alone: nothing depends on how far a batch is padded, and a text may
    be shorter than w. A text without tokens has v = 0. P and W begin at 0, so that training begins at the
    bag and adds to it what the order of the words says. The word vectors take sparse gradients.

    Args:
        vocabulary: V, word pieces.
        width: h, of the word vectors and of Φ.
        widths: tokens that each group of filters spans.
        filters: filters of each width.
        dropout: on the joined features, in training.
        word_dropout: probability of leaving a token out (its vector is zero then), in training.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        widths: Sequence[int],
        filters: int,
        dropout: float,
        word_dropout: float,
    ):
        super().__init__()
        self.width = width
        self.word_dropout = word_dropout
        self.words = nn.Embedding(vocabulary, width, sparse=True)
        self.widths = tuple(widths)
        self.convolutions = nn.ModuleList(_convolution(width, filters, span) for span in widths)
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(len(widths) * filters, width, bias=False)
        self.residual = nn.Linear(width, width)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.residual.weight)
        nn.init.zeros_(self.residual.bias)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Φ(x), float (n, width), of int64 (n, t) token ids and mask."""
        return self._convolve(self.words(ids) * mask.to(self.words.weight.dtype).unsqueeze(-1), mask)

    def encode(self, batch: TextBatch) -> torch.Tensor:
        """Φ(x) of a training batch; only tokens, no padding, have a gradient among the word vectors."""
        kept = without_some(batch.mask, self.word_dropout if self.training else 0.0)
        vectors = self.words.weight.new_zeros(*kept.shape, self.width)
        vectors[kept] = self.words(batch.ids[kept])
        return self._convolve(vectors, kept)

    def _convolve(self, vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        columns = vectors.transpose(1, 2)
        pooled = []
        for span, convolution in zip(self.widths, self.convolutions, strict=True):
            around = pad(columns, ((span - 1) // 2, span // 2))
            pooled.append(masked_mean(torch.relu(convolution(around)).transpose(1, 2), mask))
        joined = self.dropout(torch.cat(pooled, dim=1))
        v = masked_mean(vectors, mask) + self.projection(joined)
        return v + torch.relu(self.residual(v))


def _convolution(width: int, filters: int, span: int) -> nn.Conv1d:
    made = nn.Conv1d(width, filters, span)
    assert made.bias is not None
    # Features then begin at the scale of the word vectors, however long those are.
    nn.init.kaiming_normal_(made.weight, nonlinearity="relu")
    nn.init.zeros_(made.bias)
    return made
