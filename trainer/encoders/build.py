"""From an encoder's configuration to Φ: freshly pretrained, or empty for a checkpoint's weights."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import (
    BagEncoderConfig,
    CombinedEncoderConfig,
    EncoderConfig,
    InceptionEncoderConfig,
    TransformerEncoderConfig,
)
from trainer.encoders import pretrained
from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import Encoder, Frozen
from trainer.encoders.combined import CombinedEncoder
from trainer.encoders.inception import InceptionEncoder
from trainer.encoders.transformer import TransformerEncoder, check_split

# Plain values, which go into a checkpoint: all that the shapes depend on beside the configuration.
Architecture = dict[str, Any]


def new_encoder(config: EncoderConfig) -> tuple[Encoder, Architecture]:
    """An encoder that starts from pretrained weights, and the architecture `empty_encoder` needs.

    Raises:
        ConfigError: the pretrained encoder can't be loaded or does not fit the configuration.
    """
    if isinstance(config, BagEncoderConfig | InceptionEncoderConfig):
        words = pretrained.load_word_vectors(config.pretrained)
        architecture = _word_shape(words)
        encoder = _over_words(config, architecture)
        encoder.words.weight.data.copy_(words)
        return encoder, architecture
    if isinstance(config, TransformerEncoderConfig):
        return _new_transformer(config), pretrained.transformer_config(config.pretrained)
    transformer = _new_transformer(config)
    words = transformer.model.get_input_embeddings().weight.detach()
    tokenizer = pretrained.load_tokenizer(config.pretrained, max_tokens=8, special_tokens=True)
    architecture = {
        "words": _word_shape(words),
        "transformer": pretrained.transformer_config(config.pretrained),
        "added_tokens": list(tokenizer.encode("").ids),
    }
    combined = _combined(config, transformer, architecture)
    combined.bag.words.weight.data.copy_(words)
    return combined, architecture


def empty_encoder(config: EncoderConfig, architecture: Architecture) -> Encoder:
    """An encoder of the right shape for a checkpoint's weights; reads nothing from disk or hub."""
    if isinstance(config, BagEncoderConfig | InceptionEncoderConfig):
        return _over_words(config, architecture)
    if isinstance(config, TransformerEncoderConfig):
        return TransformerEncoder(_empty_model(architecture), config.pooling, config.frozen_layers)
    transformer = TransformerEncoder(
        _empty_model(architecture["transformer"]), config.pooling, config.frozen_layers
    )
    return _combined(config, transformer, architecture)


def uses_special_tokens(config: EncoderConfig) -> bool:
    """Whether texts are to be tokenised with the model's special tokens, such as [CLS] and [SEP]."""
    return isinstance(config, TransformerEncoderConfig | CombinedEncoderConfig)


def _word_shape(words: torch.Tensor) -> Architecture:
    return {"vocabulary": words.shape[0], "width": words.shape[1]}


def _over_words(
    config: BagEncoderConfig | InceptionEncoderConfig, architecture: Architecture
) -> BagEncoder | InceptionEncoder:
    vocabulary, width = architecture["vocabulary"], architecture["width"]
    if isinstance(config, BagEncoderConfig):
        return BagEncoder(vocabulary, width, config.dropout, config.word_dropout)
    return InceptionEncoder(
        vocabulary, width, config.widths, config.filters, config.dropout, config.word_dropout
    )


def _combined(
    config: CombinedEncoderConfig, transformer: TransformerEncoder, architecture: Architecture
) -> CombinedEncoder:
    shape = architecture["words"]
    bag = BagEncoder(shape["vocabulary"], shape["width"], config.dropout, config.word_dropout)
    return CombinedEncoder(bag, transformer, architecture["added_tokens"])


def _new_transformer(config: TransformerEncoderConfig | CombinedEncoderConfig) -> TransformerEncoder:
    model = pretrained.load_transformer(config.pretrained)
    encoder = TransformerEncoder(model, config.pooling, config.frozen_layers)
    if encoder.frozen is Frozen.LAYERS:
        check_split(encoder)
    return encoder


def _empty_model(architecture: Architecture) -> Any:
    from transformers import AutoConfig, AutoModel

    fields = {name: value for name, value in architecture.items() if name != "model_type"}
    shape = AutoConfig.for_model(architecture["model_type"], **fields)
    return AutoModel.from_config(shape, attn_implementation="eager").float()
