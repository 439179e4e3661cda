"""A table whose labels stand in groups: what the cascade and the sampling share."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch

from trainer.classifiers.table import TableClassifier


class GroupedTable(TableClassifier):
    """One row ψ_l a label, and for each label its group.

    Args:
        width: d.
        lengths: (number of groups G, members of the largest group M).
        codes: int32 (L, 2): group and place in it, distinct.
        sampled_groups: random groups whose members join the pool, beside those of the true groups.
        most: largest number of labels that a step adds.
    """

    group_of: torch.Tensor
    members: torch.Tensor

    def __init__(
        self, width: int, lengths: tuple[int, int], codes: torch.Tensor, sampled_groups: int, most: int
    ):
        super().__init__(len(codes), width)
        self.lengths = lengths
        self.sampled_groups = sampled_groups
        self.most = most
        members = torch.full(lengths, -1, dtype=torch.int32)
        members[codes[:, 0].long(), codes[:, 1].long()] = torch.arange(len(codes), dtype=torch.int32)
        # Labels of each group, -1 where it has fewer than the largest.
        self.register_buffer("members", members)
        self.register_buffer("group_of", codes[:, 0].to(torch.int32).clone())

    def groups_of(self, labels: torch.Tensor) -> torch.Tensor:
        """Group of each of int64 (m,) labels, int64 (m,)."""
        return self.group_of.index_select(0, labels.to(self.group_of.device)).long()

    def extra_labels(self, positives: sp.csr_matrix, rng: np.random.Generator) -> np.ndarray:
        """Members of the groups of the batch's positives and of `sampled_groups` random ones.

        Where they are more than `most`, that many are drawn of them uniformly.

        Args:
            positives: CSR (n, L), the rows of the batch's queries.
            rng: the source of all that is random.

        Returns:
            int64, distinct, ascending.
        """
        groups, size = self.lengths
        own = self.groups_of(torch.from_numpy(np.unique(positives.indices).astype(np.int64))).cpu().numpy()
        further = rng.choice(groups, min(self.sampled_groups, groups), replace=False)
        chosen = np.union1d(own, further)
        places = len(chosen) * size
        taken = np.arange(places)
        if places > self.most:
            taken = rng.choice(places, self.most, replace=False, shuffle=False)
        at = torch.from_numpy(chosen[taken // size].astype(np.int64)).to(self.members.device)
        place = torch.from_numpy(taken % size).to(self.members.device)
        labels = self.members[at, place].cpu().numpy().astype(np.int64)
        return np.sort(labels[labels >= 0])
