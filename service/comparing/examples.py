"""The queries whose answers changed, most traffic first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel

from service.comparing.answers import Answers, Pair


class Example(BaseModel):
    """A query that A and B answer differently.

    Attributes:
        query: its first spelling in the log.
        count: rows of the log with it.
        common: phrases that both answer.
        lost: phrases of A that B does not answer, in A's order.
        gained: phrases of B that A does not answer, in B's order.
    """

    query: str
    count: int
    common: int
    lost: list[str]
    gained: list[str]


class Examples(BaseModel):
    """Queries of each kind.

    Attributes:
        lost: the most searched with matches in A and none in B.
        gained: the most searched with matches in B and none in A.
        changed: of those with matches in both, the ones with the greatest count times share of phrases that
            only one of A and B answers, of all that either does.
    """

    lost: list[Example]
    gained: list[Example]
    changed: list[Example]


@dataclass(frozen=True)
class _Ranked:
    """An example, what it is ranked by, and its query's place in the log, which decides between equals."""

    weight: float
    place: int
    example: Example


class TopExamples:
    """The first examples of each kind among some queries of the log. They add up.

    Args:
        pair: the answers to n queries.
        queries: the queries.
        counts: int64 (n,), how often the log has each.
        place: of the first query among all.
        most: examples of each kind.
    """

    def __init__(self, pair: Pair, queries: list[str], counts: np.ndarray, place: int, most: int):
        self._most = most
        alone_a, alone_b = pair.many_a - pair.common, pair.many_b - pair.common
        apart = (alone_a + alone_b) / np.maximum(alone_a + alone_b + pair.common, 1)
        has_a, has_b = pair.many_a > 0, pair.many_b > 0

        def first(among: np.ndarray, weights: np.ndarray) -> list[_Ranked]:
            rows = np.flatnonzero(among)
            rows = rows[np.argsort(-weights[rows], kind="stable")[:most]]
            return [
                _Ranked(
                    float(weights[row]),
                    place + row,
                    Example(
                        query=queries[row],
                        count=int(counts[row]),
                        common=int(pair.common[row]),
                        lost=_phrases(pair.a, pair.lost, row),
                        gained=_phrases(pair.b, pair.gained, row),
                    ),
                )
                for row in rows.tolist()
            ]

        self._kinds = {
            "lost": first(has_a & ~has_b, counts),
            "gained": first(has_b & ~has_a, counts),
            "changed": first(has_a & has_b & (apart > 0), counts * apart),
        }

    def add(self, more: TopExamples) -> None:
        """Count other queries in."""
        for kind, others in more._kinds.items():
            ranked = sorted([*self._kinds[kind], *others], key=lambda one: (-one.weight, one.place))
            self._kinds[kind] = ranked[: self._most]

    def examples(self) -> Examples:
        """The first of each kind, in order."""
        return Examples(**{kind: [one.example for one in ranked] for kind, ranked in self._kinds.items()})


def _phrases(answers: Answers, chosen: np.ndarray, row: int) -> list[str]:
    low, high = np.searchsorted(answers.rows[chosen], [row, row + 1])
    found: list[str] = answers.phrases.take(chosen[low:high]).to_pylist()
    return found
