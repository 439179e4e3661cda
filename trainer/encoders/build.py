"""From an encoder's configuration to Φ: freshly pretrained, or empty for a checkpoint's weights."""

from __future__ import annotations

from typing import Any

from trainer.config import BagEncoderConfig, EncoderConfig, TransformerEncoderConfig
from trainer.encoders import pretrained
from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import Encoder
from trainer.encoders.transformer import TransformerEncoder, check_split

Architecture = dict[str, Any]


def new_encoder(config: EncoderConfig) -> tuple[Encoder, Architecture]:
    """An encoder that starts from pretrained weights, and the architecture `empty_encoder` needs.

    Raises:
        ConfigError: the pretrained encoder can't be loaded or does not fit the configuration.
    """
    if isinstance(config, BagEncoderConfig):
        words = pretrained.load_word_vectors(config.pretrained)
        architecture: Architecture = {"vocabulary": words.shape[0], "width": words.shape[1]}
        bag = _bag(config, architecture)
        bag.words.weight.data.copy_(words)
        return bag, architecture
    if isinstance(config, TransformerEncoderConfig):
        architecture = pretrained.transformer_config(config.pretrained)
        model = pretrained.load_transformer(config.pretrained)
        encoder = TransformerEncoder(model, config.pooling, config.frozen_layers)
        if config.frozen_layers:
            check_split(encoder)
        return encoder, architecture
    raise NotImplementedError(config.kind)


def empty_encoder(config: EncoderConfig, architecture: Architecture) -> Encoder:
    """An encoder of the right shape for a checkpoint's weights; reads nothing from disk or hub."""
    if isinstance(config, BagEncoderConfig):
        return _bag(config, architecture)
    if isinstance(config, TransformerEncoderConfig):
        return TransformerEncoder(_empty_transformer(architecture), config.pooling, config.frozen_layers)
    raise NotImplementedError(config.kind)


def uses_special_tokens(config: EncoderConfig) -> bool:
    """Whether texts are to be tokenised with the model's special tokens, such as [CLS] and [SEP]."""
    return config.kind in ("transformer", "combined")


def _bag(config: BagEncoderConfig, architecture: Architecture) -> BagEncoder:
    return BagEncoder(architecture["vocabulary"], architecture["width"], config.dropout, config.word_dropout)


def _empty_transformer(architecture: Architecture) -> Any:
    from transformers import AutoConfig, AutoModel

    fields = {name: value for name, value in architecture.items() if name != "model_type"}
    shape = AutoConfig.for_model(architecture["model_type"], **fields)
    return AutoModel.from_config(shape, attn_implementation="eager").float()
