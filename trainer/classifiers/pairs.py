"""Ψ of each pair of heads."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from trainer.classifiers.base import Classifier
from trainer.classifiers.build import new_classifier
from trainer.config import TrainConfig

PAIRS = ("narrow", "wide")


def new_classifiers(config: TrainConfig, labels: int, codes: torch.Tensor | None = None) -> nn.ModuleDict:
    """The classifier of each pair of heads under its name, on the CPU; none where the classifier is off.

    Args:
        config: of the run.
        labels: L.
        codes: int32 (L, H) local labels, where the kind has them; a checkpoint's state brings its own.
    """
    dims = [config.dim, config.wide_dim] if config.wide_dim else [config.dim]
    widths = [config.split_width(dim)[1] for dim in dims]
    return nn.ModuleDict(
        {
            name: new_classifier(config.classifier, labels, width, codes)
            for name, width in zip(PAIRS, widths, strict=False)
            if width
        }
    )


def classifier_at(classifiers: nn.ModuleDict, level: int) -> Classifier:
    """The classifier of the narrow (0) or the wide (1) pair of heads."""
    return cast(Classifier, classifiers[PAIRS[level]])


def tables_of(classifiers: nn.ModuleDict) -> list[torch.Tensor]:
    """All of Ψ for each pair of heads, float (L, c), without gradient; none where the classifier is off."""
    found = [classifier_at(classifiers, level) for level in range(len(classifiers))]
    return [classifier.table(0, classifier.labels) for classifier in found]
