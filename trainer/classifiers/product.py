"""Multi-Head Product: the log-scores of H short heads add up, so ψ_l = Σ_h W_h[l_h]."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import normalize

from trainer.classifiers.base import Classifier
from trainer.classifiers.local_loss import local_cross_entropy

_ROUNDS = 10


class ProductClassifier(Classifier):
    """H heads W_h of N_h rows each, instead of L rows.

    p(l|x) = Π_h p_h(l_h|x), with p_h the softmax of Φ_C(x)·W_h[j] over the N_h local labels j: the log-scores
    of the heads add up to Φ_C(x)·Σ_h W_h[l_h] and a term that is the same for all labels. So the sum serves
    as one vector a label. Given a query the heads are independent: two positives (a, b) and (c, d) raise
    (a, d) and (c, b) as much, which costs where a query has several labels and nothing where it has one.

    Args:
        width: d.
        lengths: N_1, ..., N_H.
        codes: int32 (L, H), distinct rows, `codes[:, h] < lengths[h]`.
        by_heads: train each head on its local labels (as above); else the configured loss scores the rows
            ψ_l of the pool.
    """

    codes: torch.Tensor

    def __init__(self, width: int, lengths: tuple[int, ...], codes: torch.Tensor, by_heads: bool):
        super().__init__(len(codes), width)
        self.lengths = lengths
        self.by_heads = by_heads
        self.register_buffer("codes", codes.to(torch.int32).clone())
        # The sum of H rows is then about unit length.
        std = (width * len(lengths)) ** -0.5
        self.heads = nn.ParameterList(nn.Parameter(torch.randn(length, width) * std) for length in lengths)

    def rows(self, labels: torch.Tensor) -> torch.Tensor:
        """ψ_l = Σ_h W_h[l_h], float (m, d), of int64 (m,) labels."""
        local = self._local(labels)
        total = self.heads[0].index_select(0, local[:, 0])
        for head in range(1, len(self.lengths)):
            total = total + self.heads[head].index_select(0, local[:, head])
        return total

    def local_scores(self, phi_c: torch.Tensor, temperature: float, normalise: bool) -> list[torch.Tensor]:
        """Scores of each head's local labels, H float (n, N_h), of float (n, d) queries.

        A label's score is their sum. `normalise` brings the queries to unit length, not the heads' rows: a
        sum of cosines would be no inner product with one vector a label.
        """
        phi_c = normalize(phi_c, dim=1) if normalise else phi_c
        return [phi_c @ head.to(phi_c.device).T / temperature for head in self.heads]

    def loss(
        self,
        phi_c: torch.Tensor,
        labels: torch.Tensor,
        positives: torch.Tensor,
        temperature: float,
        normalise: bool,
    ) -> torch.Tensor | None:
        """Σ_h of the heads' cross-entropies, each over all its N_h local labels.

        The pool only says which labels are positives.
        """
        if not self.by_heads:
            return None
        local = self._local(labels).to(phi_c.device)
        scores = self.local_scores(phi_c, temperature, normalise)
        terms = [local_cross_entropy(s, local[:, head], positives) for head, s in enumerate(scores)]
        return torch.stack(terms).sum()

    @torch.no_grad()
    def start_from(self, psi: torch.Tensor) -> None:
        """Least squares: Σ_l |ψ_l - Σ_h W_h[l_h]|² is lowered head by head.

        Each head goes to the means, by local label, of what the other heads leave over.

        Args:
            psi: float (L, d).
        """
        rest = psi.to(self.device, torch.float32).clone()
        for head in self.heads:
            head.zero_()
        for _ in range(_ROUNDS if len(self.lengths) > 1 else 1):
            for number, head in enumerate(self.heads):
                local = self.codes[:, number].long()
                counts = torch.bincount(local, minlength=len(head)).clamp(min=1).unsqueeze(1)
                step = torch.zeros_like(head).index_add_(0, local, rest) / counts
                head += step
                rest -= step.index_select(0, local)

    def _local(self, labels: torch.Tensor) -> torch.Tensor:
        return self.codes.index_select(0, labels.to(self.codes.device)).long()
