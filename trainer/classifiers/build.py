"""The classifier that a configuration asks for, and its codes."""

from __future__ import annotations

import numpy as np
import torch

from bidmatch.base.errors import ConfigError
from trainer.classifiers.base import Classifier
from trainer.classifiers.cascade import CascadeClassifier
from trainer.classifiers.codes import check_lengths, choose_lengths, cluster_codes, group_lengths, id_codes
from trainer.classifiers.product import ProductClassifier
from trainer.classifiers.sampled import SampledClassifier
from trainer.classifiers.table import TableClassifier
from trainer.config import CascadeConfig, ProductConfig, SampledConfig, TableConfig

AnyConfig = TableConfig | ProductConfig | CascadeConfig | SampledConfig
Coded = ProductConfig | CascadeConfig | SampledConfig


def needs_label_embeddings(config: AnyConfig) -> bool:
    """Whether `make_codes` needs them."""
    return not isinstance(config, TableConfig) and config.codes == "clusters"


def code_lengths(config: Coded, labels: int) -> tuple[int, ...]:
    """N_1, ..., N_H of the heads; for groups, (their number, members of the largest).

    Raises:
        ConfigError: the configured lengths cannot hold L labels.
    """
    if not isinstance(config, ProductConfig):
        return group_lengths(config.groups, labels)
    lengths = config.lengths or choose_lengths(labels, config.heads)
    check_lengths(lengths, labels, config.heads)
    return lengths


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

    Raises:
        ConfigError: the configured lengths cannot hold L labels, or clusters lack embeddings.
    """
    if isinstance(config, TableConfig):
        return None
    lengths = code_lengths(config, labels)
    if config.codes == "ids":
        return torch.from_numpy(id_codes(labels, lengths))
    if label_embeddings is None:
        raise ConfigError(
            "classifier.codes is clusters, but there are no label embeddings to cluster",
            hint="Set classifier.codes=ids.",
        )
    return torch.from_numpy(
        cluster_codes(torch.as_tensor(label_embeddings).float().cpu().numpy(), lengths, rng)
    )


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

    Raises:
        ConfigError: the configured lengths cannot hold L labels.
    """
    if isinstance(config, TableConfig):
        return TableClassifier(labels, width)
    lengths = code_lengths(config, labels)
    if codes is None:
        codes = torch.from_numpy(id_codes(labels, lengths))
    if isinstance(config, ProductConfig):
        return ProductClassifier(width, lengths, codes, by_heads=config.loss == "heads")
    groups = (lengths[0], lengths[1])
    if isinstance(config, CascadeConfig):
        return CascadeClassifier(width, groups, codes, config.top_groups, config.most_labels)
    return SampledClassifier(width, groups, codes, config.sampled_groups, config.most_labels)
