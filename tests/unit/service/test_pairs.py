from __future__ import annotations

import numpy as np
import pytest

from service.pairs import Pairs, both, found_pairs, join


def case(seed: int, n: int = 7, c: int = 30):
    """Found phrases with few distinct scores, so that many tie, and exact matches, some found, too.

    Fewer than c are found for some queries, and none for one of them.
    """
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(40)[:c] for _ in range(n)])
    rows[np.arange(c) >= rng.permutation([0, 1, 5, *[c] * (n - 3)])[:, None]] = -1
    parts = rng.integers(-3, 4, (2, n, c)).astype(np.float32)
    positions = np.sort(rng.integers(0, n, 5))
    same_rows = np.array([rng.choice(40) for _ in positions])
    _, first = np.unique(positions * 40 + same_rows, return_index=True)
    positions, same_rows = positions[first], same_rows[first]
    scores = rng.integers(-3, 4, (2, len(positions))).astype(np.float32)
    return rows, parts, Pairs(positions, same_rows, *scores, np.ones(len(positions), bool))


def by_sorting(rows, parts, same: Pairs, k, min_score):
    answers = []
    for query in range(len(rows)):
        exact = {
            int(row): float(a + b)
            for at, row, a, b in zip(same.positions, same.rows, same.encoder, same.classifier, strict=True)
            if at == query
        }
        found = {
            int(row): float(score)
            for row, score in zip(rows[query], parts[:, query].sum(0), strict=True)
            if row >= 0 and row not in exact and (min_score is None or score >= min_score)
        }
        order = [sorted(group, key=lambda row: (-group[row], row)) for group in (exact, found)]
        answers += [(query, row, row in exact) for row in [*order[0], *order[1]][:k]]
    return answers


@pytest.mark.parametrize("k", [1, 4, 29, 30, 100])
@pytest.mark.parametrize("min_score", [None, 0.0, 5.0, 9.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_are_those_of_a_full_sort(seed: int, min_score: float | None, k: int) -> None:
    rows, parts, same = case(seed)
    best = join(same, found_pairs(rows, *parts, k, min_score)).best(k)
    got = list(zip(best.positions.tolist(), best.rows.tolist(), best.exact.tolist(), strict=True))
    assert got == by_sorting(rows, parts, same, k, min_score)


def test_no_exact_matches_and_nothing_found() -> None:
    rows, parts, same = case(0)
    found = found_pairs(rows, *parts, 3, None)
    none = same.take(np.zeros(0, np.int64))
    assert join(none, found) is found
    left = join(same, found_pairs(rows, *parts, 3, min_score=100.0)).best(10)
    assert left.exact.all()
    assert len(left.rows) == len(same.rows)


def test_both_are_all_the_pairs_of_each() -> None:
    rows, parts, same = case(1)
    found = found_pairs(rows, *parts, 100, None)
    none = same.take(np.zeros(0, np.int64))
    assert both(none, found) is found
    assert both(found, none) is found
    whole = both(same, found)
    for name in ("positions", "rows", "encoder", "classifier", "exact"):
        expected = np.concatenate([getattr(same, name), getattr(found, name)])
        np.testing.assert_array_equal(getattr(whole, name), expected)
        assert getattr(whole, name).dtype == expected.dtype


def test_of_what_was_not_found_nothing_is_left() -> None:
    rows = np.full((2, 3), -1)
    # A score beside -1 means nothing.
    scores = np.full((2, 3), 5.0, np.float32)
    for k in (1, 3, 10):
        assert not len(found_pairs(rows, scores, scores, k, None).rows)
