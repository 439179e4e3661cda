"""What the training step, evaluation and export ask of a classifier."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import scipy.sparse as sp
import torch
from torch import nn


class Classifier(nn.Module, ABC):
    """Ψ: one vector ψ_l a label, however it is stored.

    Everything that must come back with a checkpoint is a parameter or a buffer, so the state dict is the
    whole of it. Parameters of which a step touches few rows are `nn.Embedding(sparse=True)` (for `RowAdam`);
    all others are small and dense (for AdamW).

    Args:
        labels: L.
        width: d, the width of ψ_l.
    """

    def __init__(self, labels: int, width: int):
        super().__init__()
        self.labels = labels
        self.width = width

    @abstractmethod
    def rows(self, labels: torch.Tensor) -> torch.Tensor:
        """ψ_l of int64 (m,) labels on the classifier's device, float (m, d), differentiable."""

    @torch.no_grad()
    def table(self, start: int, stop: int) -> torch.Tensor:
        """ψ_l of the labels `start` to `stop - 1`, float (stop - start, d), without gradient."""
        return self.rows(torch.arange(start, stop, device=self.device)).detach()

    @abstractmethod
    def start_from(self, psi: torch.Tensor) -> None:
        """Begin as near as this classifier can to float (L, d) vectors, one a label."""

    def extra_labels(self, positives: sp.csr_matrix, rng: np.random.Generator) -> np.ndarray:
        """Labels that join the classifier's pool in a step, int64, distinct, ascending; none by default.

        Args:
            positives: CSR (n, L), the rows of the batch's queries.
            rng: the source of all that is random.
        """
        del positives, rng
        return np.zeros(0, dtype=np.int64)

    def loss(
        self,
        phi_c: torch.Tensor,
        labels: torch.Tensor,
        positives: torch.Tensor,
        temperature: float,
        normalise: bool,
    ) -> torch.Tensor | None:
        """The classifier's own training loss, a scalar; None: score `rows` with the configured loss.

        Args:
            phi_c: Φ_C of the queries, float (n, d).
            labels: the pool, int64 (m,), on the classifier's device.
            positives: float (n, m), 1 (or a soft target) for a positive of the pool.
            temperature: divides the scores.
            normalise: scores are cosines, not plain inner products.
        """
        del phi_c, labels, positives, temperature, normalise
        return None

    @property
    def not_in_index(self) -> str | None:
        """What an index of one vector ψ_l a label cannot reproduce, in words; None: it loses nothing."""
        return None

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.parameters()).device

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Tables whose gradients are sparse: for `RowAdam`."""
        tables = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding) and m.sparse}
        return [parameter for parameter in self.parameters() if id(parameter) in tables]

    def dense_parameters(self) -> list[nn.Parameter]:
        """All other parameters: for AdamW."""
        sparse = {id(parameter) for parameter in self.sparse_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sparse]
