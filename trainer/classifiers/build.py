"""The classifier that a configuration asks for, and its codes."""

from __future__ import annotations

import numpy as np
import torch

from trainer.classifiers.base import Classifier
from trainer.classifiers.table import TableClassifier
from trainer.config import CascadeConfig, ProductConfig, SampledConfig, TableConfig

AnyConfig = TableConfig | ProductConfig | CascadeConfig | SampledConfig


def make_codes(
    config: AnyConfig,
    label_embeddings: np.ndarray | torch.Tensor | None,
    labels: int,
    rng: np.random.Generator,
) -> torch.Tensor | None:
    """The H local labels of every label; None where the classifier has none.

    Args:
        config: of the classifier.
        label_embeddings: float (L, any), unit length; needed for codes from clusters alone.
        labels: L.
        rng: the source of all that is random.

    Returns:
        int32 (L, H), all rows distinct, or None.
    """
    del label_embeddings, labels, rng
    if isinstance(config, TableConfig):
        return None
    raise NotImplementedError(config.kind)


def new_classifier(
    config: AnyConfig, labels: int, width: int, codes: torch.Tensor | None = None
) -> Classifier:
    """A fresh classifier on the CPU, initialised from torch's global random numbers.

    Its shapes depend on `config`, `labels` and `width` alone, so one made without codes takes a checkpoint's
    state dict, codes included.

    Args:
        config: of the classifier.
        labels: L.
        width: d.
        codes: int32 (L, H) from `make_codes`, or None: those of the labels' ids.
    """
    del codes
    if isinstance(config, TableConfig):
        return TableClassifier(labels, width)
    raise NotImplementedError(config.kind)
