"""Pairs of query and phrase, in columns: what the index found, what equals the query, the best of both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """m pairs, none twice.

    Attributes:
        positions: int64 (m), the query.
        rows: int64 (m), the phrase.
        encoder: float32 (m), one part of the score.
        classifier: float32 (m), the other part.
        exact: bool (m), the phrase's key is the query's.
    """

    positions: np.ndarray
    rows: np.ndarray
    encoder: np.ndarray
    classifier: np.ndarray
    exact: np.ndarray

    def take(self, places: np.ndarray) -> Pairs:
        """The pairs at these places (indices, or a mask)."""
        return Pairs(
            self.positions[places],
            self.rows[places],
            self.encoder[places],
            self.classifier[places],
            self.exact[places],
        )

    def best(self, k: int) -> Pairs:
        """What is answered, by query, exact ones first, then by falling score, at most k a query."""
        order = np.lexsort((self.rows, -(self.encoder + self.classifier), ~self.exact, self.positions))
        ordered = self.positions[order]
        rank = np.arange(len(order)) - np.searchsorted(ordered, ordered, side="left")
        return self.take(order[rank < k])


def found_pairs(
    rows: np.ndarray, encoder: np.ndarray, classifier: np.ndarray, k: int, min_score: float | None
) -> Pairs:
    """Each query's k best of what the index found, more where scores tie.

    Args:
        rows: int64 (n, c), phrases; none twice for one query; -1 for none.
        encoder: float32 (n, c), one part of their scores.
        classifier: float32 (n, c), the other part.
        k: see above.
        min_score: leave out those with a lesser score.
    """
    scores = np.where(rows < 0, -np.inf, encoder + classifier)
    c = rows.shape[1]
    keep = rows >= 0
    if c > k:
        # Sorting ten in a hundred is what costs, so the others are left out before.
        keep &= scores >= np.partition(scores, c - k, axis=1)[:, c - k, None]
    if min_score is not None:
        keep &= scores >= min_score
    positions, columns = np.nonzero(keep)
    return Pairs(
        positions,
        rows[positions, columns],
        encoder[positions, columns],
        classifier[positions, columns],
        np.zeros(len(positions), bool),
    )


def join(same: Pairs, found: Pairs) -> Pairs:
    """The pairs of both; those of `found` that are in `same` are left out."""
    if not len(same.rows):
        return found
    if not len(found.rows):
        return same
    apart = 1 + max(int(same.rows.max()), int(found.rows.max(initial=0)))
    taken = np.sort(same.positions * apart + same.rows)
    pairs = found.positions * apart + found.rows
    places = np.minimum(np.searchsorted(taken, pairs), len(taken) - 1)
    return both(same, found.take(taken[places] != pairs))


def both(one: Pairs, other: Pairs) -> Pairs:
    """The pairs of two that have none in common."""
    if not len(other.rows):
        return one
    if not len(one.rows):
        return other
    return Pairs(
        np.concatenate([one.positions, other.positions]),
        np.concatenate([one.rows, other.rows]),
        np.concatenate([one.encoder, other.encoder]),
        np.concatenate([one.classifier, other.classifier]),
        np.concatenate([one.exact, other.exact]),
    )
