"""The plain classifier: one free row ψ_l a label."""

from __future__ import annotations

import torch
from torch import nn

from trainer.classifiers.base import Classifier


def sparse_table(rows: int, width: int) -> nn.Embedding:
    """A table of which a step updates only the rows it touches; normal rows of about unit length."""
    table = nn.Embedding(rows, width, sparse=True)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


class TableClassifier(Classifier):
    """Ψ as a table of L rows.

    Args:
        labels: L.
        width: d.
    """

    def __init__(self, labels: int, width: int):
        super().__init__(labels, width)
        self.psi = sparse_table(labels, width)

    def rows(self, labels: torch.Tensor) -> torch.Tensor:
        """ψ_l, float (m, d), of int64 (m,) labels."""
        psi: torch.Tensor = self.psi(labels)
        return psi

    @torch.no_grad()
    def table(self, start: int, stop: int) -> torch.Tensor:
        """ψ_l of the labels `start` to `stop - 1`: a view, no copy."""
        return self.psi.weight.detach()[start:stop]

    @torch.no_grad()
    def start_from(self, psi: torch.Tensor) -> None:
        """Ψ = `psi`, float (L, d)."""
        self.psi.weight.copy_(psi)
