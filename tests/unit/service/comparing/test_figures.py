from __future__ import annotations

import numpy as np
import pytest

from service.comparing.answers import pair
from service.comparing.figures import Sums

from .conftest import answers


def test_figures_by_hand() -> None:
    # Query 0: A has x, y, B has x, z. Query 1 is lost, query 2 is gained, query 3 has nothing.
    a = answers([0, 0, 1], "xyx", [1.0, 0.8, 0.5], [0.5, 0.3, 0.1])
    b = answers([0, 0, 2], "xzx", [0.6, 0.4, 0.9], [0.6, 0.2, 0.1])
    sums = Sums(pair(a, b, 4), np.array([7, 1, 1, 1]))
    once, traffic = sums.once.model_dump(), sums.traffic
    bands, quantiles = once.pop("overlap_bands"), once.pop("score_shift_quantiles")
    assert once == pytest.approx(
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
            "relevance_a": 0.3,
            "relevance_b": 0.3,
            "relevance_shift": 0.1,
        }
    )
    assert bands == {"0": 1, "(0,25]": 0, "(25,50]": 1, "(50,75]": 0, "(75,100)": 0, "100": 0}
    assert quantiles == dict.fromkeys(("p5", "p25", "p50", "p75", "p95"), -0.4)
    assert (traffic.queries, traffic.coverage_a, traffic.matches_a) == (10, 80.0, 1.5)
    assert traffic.overlap == pytest.approx(100 * 3.5 / 8)
    assert traffic.overlap_bands["(25,50]"] == 7


def test_nothing_at_all() -> None:
    none = answers([], "")
    nothing = Sums(pair(none, none, 0), np.zeros(0, np.int64))
    nothing.add(Sums(pair(answers([0], "x"), none, 1), np.array([3])))
    assert (nothing.traffic.queries, nothing.traffic.lost, nothing.traffic.overlap_bands["0"]) == (3, 3, 3)
    found = Sums(pair(none, none, 2), np.array([1, 2])).once
    assert (found.queries, found.overlap, found.same_first) == (2, None, None)
    assert (found.score_shift, found.score_shift_quantiles, found.relevance_a) == (None, None, None)


@pytest.mark.parametrize(
    ("common", "band"),
    [
        (0, "0"),
        (1, "(0,25]"),
        (2, "(0,25]"),
        (3, "(25,50]"),
        (4, "(25,50]"),
        (5, "(50,75]"),
        (6, "(50,75]"),
        (7, "(75,100)"),
        (8, "100"),
    ],
)
def test_ends_of_bands(common: int, band: str) -> None:
    a = answers([0] * 8, "abcdefgh")
    b = answers([0] * 8, "abcdefgh"[:common] + "stuvwxyz"[common:])
    found = Sums(pair(a, b, 1), np.array([3]))
    assert {name for name, many in found.once.overlap_bands.items() if many} == {band}
    assert found.traffic.overlap_bands[band] == 3


def test_quantiles_of_the_shift_are_weighed_by_traffic() -> None:
    shifts = [-0.2, -0.1, 0.0, 0.1, 0.2]
    a, b = answers([0, 1, 2, 3, 4], "abcde", [0.0] * 5), answers([0, 1, 2, 3, 4], "abcde", shifts)
    found = Sums(pair(a, b, 5), np.array([1, 1, 1, 1, 96]))
    assert found.once.score_shift_quantiles == {"p5": -0.2, "p25": -0.1, "p50": 0.0, "p75": 0.1, "p95": 0.2}
    assert found.traffic.score_shift_quantiles == {"p5": 0.2, "p25": 0.2, "p50": 0.2, "p75": 0.2, "p95": 0.2}


def test_scores_of_one_side_alone_are_not_compared() -> None:
    known, unknown = answers([0], "x", [1.0], [0.5]), answers([0], "x")
    found = Sums(pair(known, unknown, 1), np.array([1])).once
    assert (found.score_shift, found.score_shift_quantiles, found.relevance_shift) == (None, None, None)
    assert (found.relevance_a, found.relevance_b) == (0.5, None)


def test_parts_add_up() -> None:
    rng = np.random.default_rng(0)

    def drawn(queries: range) -> tuple[list[int], str, list[float]]:
        rows, names = [], ""
        for query in queries:
            chosen = rng.permutation(list("abcdef"))[: rng.integers(0, 5)]
            rows += [query - queries.start] * len(chosen)
            names += "".join(chosen)
        return rows, names, rng.normal(size=len(rows)).tolist()

    first, second = [drawn(range(20)) for _ in range(2)], [drawn(range(30)) for _ in range(2)]
    counts = rng.integers(1, 9, 50)
    whole = [
        answers(one[0] + [20 + row for row in other[0]], one[1] + other[1], one[2] + other[2])
        for one, other in zip(first, second, strict=True)
    ]
    sums = Sums(pair(*(answers(*one) for one in first), 20), counts[:20])
    sums.add(Sums(pair(*(answers(*one) for one in second), 30), counts[20:]))
    at_once = Sums(pair(*whole, 50), counts)
    assert (sums.once, sums.traffic) == (at_once.once, at_once.traffic)
