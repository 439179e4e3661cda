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
        rows: int64 (n, c), phrases; none twice for one query.
        encoder: float32 (n, c), one part of their scores.
        classifier: float32 (n, c), the other part.
        k: see above.
        min_score: leave out those with a lesser score.
    """
    scores = encoder + classifier
    c = rows.shape[1]
    if c > k:
        # Sorting ten in a hundred is what costs, so the others are left out before.
        keep = scores >= np.partition(scores, c - k, axis=1)[:, c - k, None]
        keep &= min_score is None or scores >= min_score
    else:
        keep = np.ones(rows.shape, bool) if min_score is None else scores >= min_score
    positions, columns = np.nonzero(keep)
    return Pairs(
        positions,
        rows[positions, columns],
        encoder[positions, columns],
        classifier[positions, columns],
        np.zeros(len(positions), bool),
    )


def join(same: Pairs, found: Pairs) -> Pairs:
    """Exact matches and what the index found, which leaves out those."""
    if not len(same.rows):
        return found
    apart = 1 + max(int(same.rows.max()), int(found.rows.max(initial=0)))
    taken = np.sort(same.positions * apart + same.rows)
    pairs = found.positions * apart + found.rows
    places = np.minimum(np.searchsorted(taken, pairs), len(taken) - 1)
    found = found.take(taken[places] != pairs)
    return Pairs(
        np.concatenate([same.positions, found.positions]),
        np.concatenate([same.rows, found.rows]),
        np.concatenate([same.encoder, found.encoder]),
        np.concatenate([same.classifier, found.classifier]),
        np.concatenate([same.exact, found.exact]),
    )
