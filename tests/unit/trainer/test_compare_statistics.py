from __future__ import annotations

import math

import numpy as np
import pytest

from trainer.compare.items import Item
from trainer.compare.records import Row, Run
from trainer.compare.rows import measured_row, trained_row
from trainer.compare.statistics import (
    COMPARED,
    all_differences,
    difference,
    half_width,
    query_error,
    spread,
    view_differences,
)
from trainer.config import TrainConfig


def figures(p_at_1: float) -> dict[str, dict[str, float]]:
    return {part: dict.fromkeys(COMPARED, p_at_1) for part in ("all", "head", "torso", "tail")}


def row(name: str, *values: float | None) -> Row:
    runs = [
        Run(seed=seed, error="broke")
        if value is None
        else Run(seed=seed, views={"dual_encoder": figures(value - 1), "concatenation": figures(value)})
        for seed, value in enumerate(values)
    ]
    return trained_row(Item(name, name, name, TrainConfig()), runs)


def test_spread_is_mean_and_sample_deviation():
    found = spread([1.0, 2.0, 6.0])
    assert found.mean == 3.0
    assert found.sd == pytest.approx(math.sqrt(7.0))
    assert spread([4.0]).sd is None
    assert math.isnan(spread([math.nan, math.nan]).mean)


def test_the_error_over_queries_is_that_of_a_share():
    rng = np.random.default_rng(0)
    means = 100 * rng.binomial(400, 0.3, size=20_000) / 400
    assert query_error(30.0, 400) == pytest.approx(means.std(), rel=0.03)
    assert query_error(0.0, 400) == 0.0
    assert math.isnan(query_error(10.0, 0))


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    draws = rng.normal(5.0, 2.0, size=(2000, 3))
    inside = [abs(values.mean() - 5.0) <= half_width(values) for values in draws]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)
    assert half_width(np.array([1.0])) is None


def test_what_all_seeds_share_is_no_noise():
    seeds = {0: 40.0, 1: 44.0, 2: 48.0}
    better = {seed: value + 3 + 0.1 * seed for seed, value in seeds.items()}
    found = difference(better, seeds, 100_000)
    assert found.mean == pytest.approx(3.1)
    assert found.half_width == pytest.approx(0.1 / math.sqrt(3) * 4.3027, rel=1e-4)
    assert found.within_noise is False


def test_a_difference_below_the_error_over_queries_is_noise():
    seeds = {0: 40.0, 1: 41.0, 2: 42.0}
    better = {seed: value + 3 for seed, value in seeds.items()}
    assert difference(better, seeds, 100).within_noise is True
    assert difference(better, seeds, 10_000).within_noise is False
    assert difference(better, seeds, None).query_error is None


def test_only_seeds_that_both_have_count():
    assert difference({0: 1.0, 1: 50.0}, {1: 40.0, 2: 0.0}, None).mean == 10.0
    assert difference({0: 1.0}, {1: 40.0}, None) is None


def test_one_seed_leaves_the_spread_unknown():
    found = difference({0: 44.0}, {0: 40.0}, None)
    assert (found.mean, found.half_width, found.within_noise) == (4.0, None, None)


def test_a_ranking_without_seeds_is_held_against_each():
    found = difference({None: 44.0}, {0: 40.0, 1: 42.0}, None)
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(12.706, rel=1e-3)
    back = difference({0: 40.0, 1: 42.0}, {None: 44.0}, None)
    assert back.mean == -3.0


def test_rows_are_held_against_the_first_and_the_best():
    rows = [
        row("broken", None, None),
        row("first", 40.0, 42.0),
        row("best", 50.0, 51.0),
        measured_row("elsewhere", "ranking", "x.npz", figures(45.0), None),
    ]
    first, best = all_differences(rows, 1000)
    assert (first.reference, first.why) == ("first", "first")
    assert (best.reference, best.why) == ("best", "best")
    assert set(first.rows) == {"best", "elsewhere"}
    assert first.rows["best"]["P@1"].mean == pytest.approx(9.5)
    assert best.rows["first"]["P@1"].mean == pytest.approx(-9.5)
    assert first.rows["best"]["P@1"].query_error is not None
    assert first.rows["best"]["P@5"].query_error is None
    assert all_differences(rows[:2], 1000) == []
    assert len(all_differences([rows[2], rows[1]], 1000)) == 1


def test_a_failed_seed_leaves_the_others():
    partly = row("partly", 40.0, None, 44.0)
    assert partly.figure("P@1").mean == 42.0
    assert partly.figure("P@1").n == 2
    assert partly.errors == [(1, "broke")]
    assert row("broken", None).figure("P@1") is None


def test_views_are_held_against_the_served_one():
    found = view_differences([row("both", 40.0, 41.0)], 1000)
    assert set(found["both"]) == {"dual_encoder"}
    assert found["both"]["dual_encoder"]["P@5"].mean == pytest.approx(-1.0)
