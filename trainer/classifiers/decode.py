"""The best labels straight from the heads, without one vector a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from trainer.classifiers.codes import flat_codes

# Floats that one block of scores may hold.
_BLOCK = 2**24


@dataclass(frozen=True)
class CodeBook:
    """Which codes are labels.

    Attributes:
        lengths: N_1, ..., N_H.
        codes: int (L, H), local labels of each label.
        flat: int64 (L,), the labels' codes as numbers below Π N_h, ascending.
        labels: int64 (L,), the label of each of `flat`.
    """

    lengths: tuple[int, ...]
    codes: np.ndarray
    flat: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, codes: np.ndarray, lengths: tuple[int, ...]) -> CodeBook:
        """The book of int (L, H) codes, distinct rows."""
        flat = flat_codes(codes, lengths)
        labels = np.argsort(flat, kind="stable")
        return cls(lengths, codes, flat[labels], labels)

    def lookup(self, flat: np.ndarray) -> np.ndarray:
        """Label of each code number, int64 of the same shape; -1 for a code that is no label."""
        place = np.minimum(np.searchsorted(self.flat, flat), len(self.flat) - 1)
        return np.where(self.flat[place] == flat, self.labels[place], -1)


def product_top_k(scores: Sequence[np.ndarray], book: CodeBook, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k labels of largest Σ_h s_h[l_h], exactly as if all L were scored.

    A code whose local labels have the ranks r_1, ..., r_H (from 0) in their heads is beaten or equalled by
    the Π (r_h + 1) codes whose ranks are nowhere lower. So the codes with Π (r_h + 1) <= B hold B codes
    that no other code exceeds, and every valid one of them that lies strictly above the B-th score comes
    before all that was left out. B grows until k such labels are found, or until scoring all labels is
    cheaper.

    Args:
        scores: H float (n, N_h): of the heads' local labels.
        book: which codes are labels.
        k: labels wanted.

    Returns:
        int64 (n, k) labels and their scores (n, k), best first, equal scores by ascending label; where there
        are fewer than k labels, -1 and -inf. The sum runs over the heads in their order.
    """
    n, labels_count = len(scores[0]), len(book.labels)
    order = [np.argsort(-head, axis=1, kind="stable") for head in scores]
    ranked = [np.take_along_axis(head, by, axis=1) for head, by in zip(scores, order, strict=True)]
    labels = np.full((n, k), -1, dtype=np.int64)
    values = np.full((n, k), -np.inf, dtype=np.result_type(*scores))
    open_rows = np.arange(n)
    budget = 4 * k
    while len(open_rows) and budget < labels_count:
        ranks = _ranks(book.lengths, budget)
        if len(ranks) >= labels_count:
            break
        found = []
        for rows in np.array_split(open_rows, -(-len(open_rows) * len(ranks) // _BLOCK)):
            total, flat = np.zeros((), values.dtype), np.zeros((), np.int64)
            for head, length in enumerate(book.lengths):
                total = total + ranked[head][rows][:, ranks[:, head]]
                flat = flat * length + order[head][rows][:, ranks[:, head]]
            label = book.lookup(flat)
            bound = -np.partition(-total, budget - 1, axis=1)[:, budget - 1 : budget]
            sure = (label >= 0) & (total > bound)
            done = sure.sum(1) >= k
            total, label = np.where(sure, total, -np.inf)[done], label[done]
            best = np.lexsort((label, -total), axis=-1)[:, :k]
            labels[rows[done]] = np.take_along_axis(label, best, axis=1)
            values[rows[done]] = np.take_along_axis(total, best, axis=1)
            found.append(done)
        open_rows = open_rows[~np.concatenate(found)]
        budget *= 4
    if len(open_rows):
        take = min(k, labels_count)
        for rows in np.array_split(open_rows, -(-len(open_rows) * labels_count // _BLOCK)):
            total = np.zeros((), values.dtype)
            for head in range(len(book.lengths)):
                total = total + scores[head][rows][:, book.codes[:, head]]
            best = np.argsort(-total, axis=1, kind="stable")[:, :take]
            labels[rows, :take] = best
            values[rows, :take] = np.take_along_axis(total, best, axis=1)
    return labels, values


@lru_cache(maxsize=64)
def _ranks(lengths: tuple[int, ...], budget: int) -> np.ndarray:
    """All ranks (r_1, ..., r_H) with r_h < N_h and Π (r_h + 1) <= budget, int64 (c, H)."""
    ranks = np.zeros((1, 0), dtype=np.int64)
    product = np.ones(1, dtype=np.int64)
    for length in lengths:
        counts = np.minimum(budget // product, length)
        ends = np.cumsum(counts)
        rank = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        ranks = np.column_stack([np.repeat(ranks, counts, axis=0), rank])
        product = np.repeat(product, counts) * (rank + 1)
    return ranks


def cascade_top_k(
    queries: torch.Tensor,
    groups: torch.Tensor,
    psi: Callable[[torch.Tensor], torch.Tensor],
    members: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k labels of largest x·ψ_l among the members of each query's groups.

    Args:
        queries: x, float (n, d).
        groups: int64 (n, t), distinct groups that each query looks into.
        psi: gives ψ_l, float (..., d), of int64 labels of any shape.
        members: int (G, M), labels of each group, -1 where it has fewer.
        k: labels wanted.

    Returns:
        int64 (n, k) labels and their scores, best first; where the groups have fewer than k members, -1 and
        -inf.
    """
    n, places = len(queries), groups.shape[1] * members.shape[1]
    labels = torch.full((n, k), -1, dtype=torch.int64, device=queries.device)
    values = torch.full((n, k), -torch.inf, dtype=queries.dtype, device=queries.device)
    take = min(k, places)
    block = max(1, _BLOCK // (places * queries.shape[1]))
    for start in range(0, n, block):
        rows = slice(start, start + block)
        candidates = members[groups[rows].to(members.device)].flatten(1).long()
        vectors = psi(candidates.clamp(min=0)).to(queries.device)
        candidates = candidates.to(queries.device)
        scores = (vectors @ queries[rows].unsqueeze(2)).squeeze(2).masked_fill(candidates < 0, -torch.inf)
        best, place = scores.topk(take, dim=1)
        values[rows, :take] = best
        labels[rows, :take] = candidates.gather(1, place).masked_fill(best == -torch.inf, -1)
    return labels, values
