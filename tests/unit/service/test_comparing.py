from __future__ import annotations

import numpy as np
import pytest

from service.comparing import Answers, figures, tally


def answers(rows: list[int], names: str, scores: list[float]) -> Answers:
    return Answers(np.array(rows, np.int64), list(names), np.array(scores))


def test_figures_by_hand() -> None:
    # Query 0: A has x, y, B has x, z. Query 1 is lost, query 2 is gained, query 3 has nothing.
    a = answers([0, 0, 1], "xyx", [1.0, 0.8, 0.5])
    b = answers([0, 0, 2], "xzx", [0.6, 0.4, 0.9])
    sums = tally(a, b, np.array([7, 1, 1, 1]))
    once, traffic = map(figures, sums)
    assert once.model_dump() == pytest.approx(
        {
            "queries": 4,
            "coverage_a": 50.0,
            "coverage_b": 50.0,
            "matches_a": 0.75,
            "matches_b": 0.75,
            "overlap": 25.0,
            "same_first": 100.0,
            "gained": 1,
            "lost": 1,
            "score_shift": -0.4,
        }
    )
    assert (traffic.queries, traffic.coverage_a, traffic.matches_a) == (10, 80.0, 1.5)
    assert traffic.overlap == pytest.approx(100 * 3.5 / 8)


def test_nothing_at_all() -> None:
    none = answers([], "", [])
    found = figures(tally(none, none, np.array([1, 2]))[0])
    assert (found.queries, found.overlap, found.same_first, found.score_shift) == (2, None, None, None)
