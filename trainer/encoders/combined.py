"""The bag's features beside a transformer's: words as the log uses them, and as pretraining knows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import normalize

from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import Encoder, TextBatch
from trainer.encoders.transformer import TransformerEncoder


class CombinedEncoder(Encoder):
    """Φ(x) = [Φ_bag(x) ⊕ N(Φ_transformer(x))].

    The transformer's vector is brought to unit length, about that of the bag's: as it comes it is ten times
    as long (MiniLM) and would drown the bag in the heads. What the tokenizer adds to every text, such as
    [CLS] and [SEP], is for the transformer alone.

    Args:
        bag: Φ_bag, on the transformer's vocabulary.
        transformer: Φ_transformer, training or frozen.
        added_tokens: ids of the tokens that the tokenizer adds.
    """

    added_tokens: torch.Tensor

    def __init__(self, bag: BagEncoder, transformer: TransformerEncoder, added_tokens: Sequence[int]):
        super().__init__()
        self.bag = bag
        self.transformer = transformer
        self.width = bag.width + transformer.width
        self.frozen = transformer.frozen
        self.register_buffer(
            "added_tokens", torch.tensor(list(added_tokens), dtype=torch.int64), persistent=False
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Φ(x), float (n, width), of int64 (n, t) token ids and mask."""
        return self._joined(self.bag(ids, self._words(ids, mask)), self.transformer(ids, mask))

    def encode(self, batch: TextBatch) -> torch.Tensor:
        """Φ(x) of a training batch, the transformer's part from what is cached of it where there is such."""
        words = TextBatch(batch.ids, self._words(batch.ids, batch.mask))
        return self._joined(self.bag.encode(words), self.transformer.encode(batch))

    def frozen_part(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """That of the transformer."""
        return self.transformer.frozen_part(ids, mask)

    def _words(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        added = (ids.unsqueeze(-1) == self.added_tokens).any(-1)
        return mask * (~added).to(mask.dtype)

    @staticmethod
    def _joined(bag: torch.Tensor, transformer: torch.Tensor) -> torch.Tensor:
        return torch.cat([bag, normalize(transformer, dim=1)], dim=1)
