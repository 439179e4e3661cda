"""InceptionXML's idea: convolutions of several widths over the word-piece vectors of a short text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import cast

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
        vectors = self.words(ids) * mask.to(self.words.weight.dtype).unsqueeze(-1)
        return self._pool(vectors, self._products(vectors), mask)

    def encode(self, batch: TextBatch) -> torch.Tensor:
        """Φ(x) of a training batch; only tokens, no padding, are multiplied and have a gradient."""
        kept = without_some(batch.mask, self.word_dropout if self.training else 0.0)
        tokens = self.words(batch.ids[kept])

        def placed(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(*kept.shape, values.shape[1]).masked_scatter(kept.unsqueeze(-1), values)

        return self._pool(placed(tokens), [placed(product) for product in self._products(tokens)], kept)

    def _products(self, vectors: torch.Tensor) -> list[torch.Tensor]:
        """Float (..., h) times the filters at each place of each span w: float (..., w · filters) a span.

        A convolution is the sum over its places, each moved by its own. Tokens alone can be multiplied so,
        where a convolution over a padded batch multiplies the padding, too.
        """
        filters = (cast(nn.Conv1d, one).weight for one in self.convolutions)
        return [vectors @ weight.permute(1, 2, 0).flatten(1) for weight in filters]

    def _pool(self, vectors: torch.Tensor, products: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        pooled = []
        for span, convolution, product in zip(self.widths, self.convolutions, products, strict=True):
            places = pad(product, (0, 0, (span - 1) // 2, span // 2)).chunk(span, dim=2)
            moved = [part[:, place : place + product.shape[1]] for place, part in enumerate(places)]
            values = reduce(torch.add, moved, cast(torch.Tensor, convolution.bias))
            pooled.append(masked_mean(torch.relu(values), mask))
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
