"""Multi-Head Cascade: a head over groups, then the members of the top groups."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import normalize

from trainer.classifiers.decode import cascade_top_k
from trainer.classifiers.groups import GroupedTable
from trainer.classifiers.local_loss import local_cross_entropy
from trainer.losses.supcon import supcon

_MASKED = -1e30


class CascadeClassifier(GroupedTable):
    """A vector c_g a group and a row ψ_l a label.

    A query is first scored against all groups, Φ_C(x)·c_g / τ, then against the members of its top groups,
    Φ_C(x)·ψ_l / τ; the latter is the label's score. Both heads see the same Φ_C and the members of the
    candidate groups are trained against each other, not group by group: the group's probability as a further
    factor counts twice what the member's score knows, and makes the answer worse (`docs/mhe.md`).

    Args:
        width: d.
        lengths: (number of groups G, members of the largest group M).
        codes: int32 (L, 2): group and place in it, distinct.
        top_groups: groups whose members are scored.
        most: largest number of labels that a step adds to the pool.
    """

    def __init__(self, width: int, lengths: tuple[int, int], codes: torch.Tensor, top_groups: int, most: int):
        super().__init__(width, lengths, codes, sampled_groups=0, most=most)
        self.top_groups = min(top_groups, lengths[0])
        self.groups = nn.Parameter(torch.randn(lengths[0], width) * width**-0.5)

    @property
    def not_in_index(self) -> str | None:
        """What is lost where only the rows ψ_l are searched."""
        return (
            f"the cascade looks into the {self.top_groups} best of {self.lengths[0]} groups of labels only; "
            "an index of the members' vectors has no group head and searches all groups, so it can also "
            "return labels of the groups that the cascade leaves out"
        )

    def group_scores(self, phi_c: torch.Tensor, temperature: float, normalise: bool) -> torch.Tensor:
        """Scores of all groups, float (n, G), of float (n, d) queries."""
        groups = self.groups.to(phi_c.device)
        if normalise:
            phi_c, groups = normalize(phi_c, dim=1), normalize(groups, dim=1)
        return phi_c @ groups.T / temperature

    def loss(
        self,
        phi_c: torch.Tensor,
        labels: torch.Tensor,
        positives: torch.Tensor,
        temperature: float,
        normalise: bool,
    ) -> torch.Tensor | None:
        """Cross-entropy over all groups, plus that over the pool's members of the query's candidate groups.

        Candidates are the groups of the query's positives in the pool and its `top_groups` best: the labels
        that a member has to beat when the cascade decides.
        """
        group = self.groups_of(labels).to(phi_c.device)
        by_group = self.group_scores(phi_c, temperature, normalise)
        group_loss = local_cross_entropy(by_group, group, positives)

        candidate = torch.zeros_like(by_group, dtype=torch.bool)
        candidate.scatter_(1, by_group.detach().topk(self.top_groups, dim=1).indices, True)
        query, column = torch.nonzero(positives > 0, as_tuple=True)
        candidate[query, group[column]] = True
        psi = self.rows(labels.to(self.device)).to(phi_c.device)
        if normalise:
            phi_c, psi = normalize(phi_c, dim=1), normalize(psi, dim=1)
        scores = phi_c @ psi.T / temperature
        scores = scores.masked_fill(~candidate.index_select(1, group), _MASKED)
        return group_loss + supcon(scores, positives)

    @torch.no_grad()
    def start_from(self, psi: torch.Tensor) -> None:
        """ψ_l = `psi`, float (L, d), and c_g the mean of the group's members."""
        super().start_from(psi)
        group = self.group_of.long()
        counts = torch.bincount(group, minlength=len(self.groups)).clamp(min=1).unsqueeze(1)
        totals = torch.zeros_like(self.groups).index_add_(0, group, self.psi.weight)
        self.groups.copy_(totals / counts)

    @torch.no_grad()
    def best(
        self, phi_c: torch.Tensor, k: int, temperature: float, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best labels by the whole cascade (see `cascade_top_k`) of float (n, d) queries."""
        groups = self.group_scores(phi_c, temperature, normalise).topk(self.top_groups, dim=1).indices
        unit = partial(normalize, dim=-1) if normalise else torch.clone

        def members(labels: torch.Tensor) -> torch.Tensor:
            return unit(self.rows(labels))

        return cascade_top_k(unit(phi_c) / temperature, groups, members, self.members, k)
