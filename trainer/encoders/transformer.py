"""A Hugging Face encoder as Φ, whole or with its lower layers frozen and cached."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bidmatch.base.errors import ConfigError
from trainer.encoders.base import Encoder, Frozen, TextBatch, masked_mean

_NOT_SPLIT = "this encoder's lower layers can't be split off and cached; use encoder.frozen_layers=0"


class _PassHidden(nn.Module):
    """Stands in for the embedding layer: hands on activations that are already there."""

    def forward(self, *values: Any, inputs_embeds: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        if inputs_embeds is not None:
            return inputs_embeds
        # DistilBERT passes them by position, behind input ids that are None.
        return next(value for value in values if value is not None and value.is_floating_point())


def _layer_list(model: nn.Module, layers: int) -> tuple[nn.Module, str]:
    """The module that owns the list of `layers` layers, and the list's attribute name."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == layers:
                return module, name
    raise ConfigError(_NOT_SPLIT)


class TransformerEncoder(Encoder):
    """Φ(x): the pooled last hidden states of a Hugging Face encoder.

    What is frozen always runs as in evaluation, without dropout: cached or not, it gives the same.

    Args:
        model: the encoder.
        pooling: `mean` over the tokens, or `cls`.
        frozen_layers: lower layers (and embeddings) that do not train; -1: nothing of it does.

    Raises:
        ConfigError: the model is more than an encoder, more layers are to be frozen than there are, or they
            can't be split off.
    """

    def __init__(self, model: Any, pooling: str, frozen_layers: int):
        super().__init__()
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{type(model).__name__} has a decoder, too; encoder.pretrained must be an encoder alone"
            )
        self.model = model
        self.pooling = pooling
        self.frozen_layers = frozen_layers
        self.width = int(model.config.hidden_size)
        layers = int(model.config.num_hidden_layers)
        if frozen_layers > layers:
            raise ConfigError(f"encoder.frozen_layers is {frozen_layers}; this encoder has {layers} layers")
        if getattr(model, "pooler", None) is not None:
            model.pooler = None
        # A tuple, so that they are not registered a second time.
        self._frozen_modules: tuple[nn.Module, ...] = ()
        if frozen_layers < 0:
            self._frozen_modules = (model,)
        elif frozen_layers:
            if not hasattr(model, "embeddings"):
                raise ConfigError(_NOT_SPLIT)
            owner, name = _layer_list(model, layers)
            self._frozen_modules = (model.embeddings, *getattr(owner, name)[:frozen_layers])
        for module in self._frozen_modules:
            module.requires_grad_(False).eval()
        if self._frozen_modules:
            trains = any(parameter.requires_grad for parameter in model.parameters())
            self.frozen = Frozen.LAYERS if trains else Frozen.WHOLE

    def train(self, mode: bool = True) -> TransformerEncoder:
        """Training mode for what trains; what is frozen stays in evaluation mode."""
        super().train(mode)
        for module in self._frozen_modules:
            module.eval()
        return self

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Φ(x), float (n, width), of int64 (n, t) token ids and mask."""
        return self._pool(self.model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)

    def encode(self, batch: TextBatch) -> torch.Tensor:
        """Φ(x) of a training batch, from what is cached of it where there is such."""
        if batch.pooled is not None:
            return batch.pooled
        if batch.hidden is None:
            return self(batch.ids, batch.mask)
        with _only_layers(self.model, self.frozen_layers, None, pass_hidden=True):
            states = self.model(inputs_embeds=batch.hidden, attention_mask=batch.mask).last_hidden_state
        return self._pool(states, batch.mask)

    def frozen_part(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Φ(x) where nothing trains, float (n, width); else the activations above the frozen layers."""
        return self(ids, mask) if self.frozen is Frozen.WHOLE else self.lower(ids, mask)

    def lower(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Activations above the frozen layers, float (n, t, h)."""
        with _only_layers(self.model, 0, self.frozen_layers, pass_hidden=False):
            hidden: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return states[:, 0] if self.pooling == "cls" else masked_mean(states, mask)


class _only_layers:  # noqa: N801
    """Within it, the model consists of layers [start, stop) only, optionally fed with activations."""

    def __init__(self, model: Any, start: int, stop: int | None, *, pass_hidden: bool):
        self.model, self.start, self.stop, self.pass_hidden = model, start, stop, pass_hidden

    def __enter__(self) -> None:
        self.owner, self.name = _layer_list(self.model, int(self.model.config.num_hidden_layers))
        self.layers = getattr(self.owner, self.name)
        self.embeddings = self.model.embeddings
        setattr(self.owner, self.name, self.layers[self.start : self.stop])
        if self.pass_hidden:
            self.model.embeddings = _PassHidden()

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.layers)
        self.model.embeddings = self.embeddings


def check_split(encoder: TransformerEncoder) -> None:
    """Holds the split at `frozen_layers` against the whole encoder on a probe.

    Raises:
        ConfigError: the two disagree, so this architecture's layers can't be cached.
    """
    ids = torch.arange(12).reshape(2, 6) + 5
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        whole = encoder(ids, mask)
        try:
            split = encoder.encode(TextBatch(ids, mask, encoder.lower(ids, mask)))
        except (TypeError, ValueError, RuntimeError) as wrong:
            # Such as a projection between embeddings and layers, which would be applied twice.
            raise ConfigError(_NOT_SPLIT) from wrong
    if not torch.allclose(whole, split, atol=1e-4):
        raise ConfigError(_NOT_SPLIT)
