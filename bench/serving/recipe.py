"""The untrained models of the measured bundles: real encoders and vocabularies, heads fitted without clicks.

How fast a service is does not depend on what its heads have learnt, but on the shape of the encoder and on
how the vectors lie. So the narrow heads are the encoder's own principal directions, at equal variance, as
training spreads them, and the vectors of the phrases are those of real texts, jittered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from export.bundle.format import Precision
from trainer.config import BagEncoderConfig, EncoderConfig, TrainConfig, TransformerEncoderConfig
from trainer.encoders.build import uses_special_tokens
from trainer.encoders.pretrained import load_tokenizer
from trainer.model import DualHeadModel, new_model

# Of Φ_D before the tanh: small enough to bend it little.
_SPREAD = 0.5
_BATCH = 256


@dataclass(frozen=True)
class Recipe:
    """A bundle to make.

    Attributes:
        name: of its folder.
        encoder: Φ; started from the packaged MiniLM-L6.
        phrases: L.
        wide_dim: width of the vectors that re-score; 0 for none.
        encoded: phrases whose texts are encoded; the others lie around these.
        jitter: length of the noise that is added to each half (of length 1) of a phrase that is not encoded.
        recall: recall@10 of exact search that the index must reach.
        seed: of heads, jitter and texts.
    """

    name: str
    encoder: EncoderConfig
    phrases: int
    wide_dim: int = 0
    encoded: int = 50_000
    jitter: float = 0.35
    recall: float = 0.98
    seed: int = 0

    @property
    def config(self) -> TrainConfig:
        """The configuration a training run of this model would have."""
        return TrainConfig(encoder=self.encoder, wide_dim=self.wide_dim, seed=self.seed)

    @property
    def precision(self) -> Precision:
        """The encoder that serves: the quantised one, as an export would choose."""
        return "int8"


def minilm(phrases: int) -> Recipe:
    """MiniLM-L6, all of its layers, 64-d."""
    return Recipe(f"minilm-{phrases}", TransformerEncoderConfig(), phrases)


def bag(phrases: int) -> Recipe:
    """The bag of word pieces, 64-d."""
    return Recipe(f"bag-{phrases}", BagEncoderConfig(), phrases)


def wide(phrases: int) -> Recipe:
    """The bag of word pieces, 64-d, re-scored at 512-d, as the preset `wide` has it."""
    return Recipe(f"wide-{phrases}", BagEncoderConfig(), phrases, wide_dim=512)


def make_model(recipe: Recipe, texts: Sequence[str]) -> tuple[DualHeadModel, Tokenizer, float]:
    """Model in evaluation mode, its tokenizer, and the mean length of Φ; the narrow heads fit `texts`."""
    torch.manual_seed(recipe.seed)
    config = recipe.config
    tokenizer = load_tokenizer(
        recipe.encoder.pretrained, config.max_tokens, special_tokens=uses_special_tokens(recipe.encoder)
    )
    model, _ = new_model(config)
    model.eval()
    with torch.inference_mode():
        phi = torch.cat([_phi(model, tokenizer, texts[i : i + _BATCH]) for i in range(0, len(texts), _BATCH)])
    _fit_heads(model, phi)
    return model, tokenizer, float(phi.norm(dim=1).mean())


def _phi(model: DualHeadModel, tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    width = max(1, *map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    phi: torch.Tensor = model.encoder(ids, mask)
    return phi


def _fit_heads(model: DualHeadModel, phi: torch.Tensor) -> None:
    """Narrow heads: the first principal directions of Φ, float (n, width), in turn Φ_D's and Φ_C's."""
    mean = phi.mean(0)
    variance, directions = torch.linalg.eigh(torch.cov(phi.T))
    order = torch.argsort(variance, descending=True)
    rows = (directions / variance.clamp_min(1e-9).sqrt()).T[order]
    for linear, scale, first in zip(narrow_heads(model), (_SPREAD, 1.0), (0, 1), strict=True):
        weight = scale * rows[first::2][: linear.out_features]
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(-weight @ mean)


def narrow_heads(model: DualHeadModel) -> tuple[nn.Linear, nn.Linear]:
    """The linear layers of g1 and g2 of the narrow pair."""
    pair = model.heads[0]
    assert isinstance(pair.g1, nn.Sequential)
    assert isinstance(pair.g2, nn.Sequential)
    g1, g2 = pair.g1[0], pair.g2[0]
    assert isinstance(g1, nn.Linear)
    assert isinstance(g2, nn.Linear)
    return g1, g2


def jittered(
    vectors: np.ndarray, splits: Sequence[int], length: float, rng: np.random.Generator
) -> np.ndarray:
    """Each part of each row moved by noise of about this length and back to unit length.

    Args:
        vectors: float32 (n, dim), parts of unit length side by side.
        splits: where the parts after the first begin.
        length: of the noise of a part.
        rng: draws it.
    """
    moved = []
    for part in np.split(vectors, splits, axis=1):
        noise = rng.standard_normal(part.shape, dtype=np.float32) * np.float32(length / part.shape[1] ** 0.5)
        part = part + noise
        moved.append(part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12))
    return np.concatenate(moved, axis=1)
