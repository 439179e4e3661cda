"""The curve from score to relevance: rising, small, honest out of sample, and exact at its threshold."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from pydantic import ValidationError

from export.bundle.relevance import MAX_KNOTS, CalibrationRecord, Relevance
from export.calibrate import calibrate, cross_fitted, fit_curve, reliability


def pairs(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, clicks, and the probability that each click was drawn with, which rises with the score."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(-1, 2, count)
    chance = 1 / (1 + np.exp(-4 * (scores - 1)))
    return scores, rng.random(count) < chance, chance


def served(queries: int = 200, depth: int = 20) -> tuple[np.ndarray, np.ndarray, sp.csr_matrix]:
    """Answers whose phrase j of query i is row i*depth+j, clicked as its score has it."""
    scores, clicked, _ = pairs(queries * depth)
    rows = np.arange(queries * depth).reshape(queries, depth)
    owner = np.repeat(np.arange(queries), depth)
    truth = sp.csr_matrix(
        (np.ones(int(clicked.sum()), np.float32), (owner[clicked], np.flatnonzero(clicked))),
        shape=(queries, queries * depth),
    )
    order = np.argsort(-scores.reshape(rows.shape), axis=1)
    ordered = np.take_along_axis(scores.reshape(rows.shape), order, 1).astype(np.float32)
    return np.take_along_axis(rows, order, 1), ordered, truth


def test_the_curve_rises_has_few_knots_and_is_near_the_truth():
    scores, clicked, chance = pairs(20_000)
    knots, relevance = fit_curve(scores, clicked)
    assert 5 < len(knots) <= MAX_KNOTS
    assert (np.diff(knots) > 0).all()
    assert (np.diff(relevance) > 0).all()
    assert relevance.min() >= 0
    assert relevance.max() <= 1
    assert np.abs(np.interp(scores, knots, relevance) - chance).max() < 0.08


def test_many_steps_are_joined_without_losing_the_mean():
    """Shares that rise in 300 steps of 40 pairs each: more steps than knots."""
    rng = np.random.default_rng(0)
    scores = np.repeat(np.arange(300), 40).astype(float)
    clicked = rng.random(len(scores)) < scores / 300
    knots, relevance = fit_curve(scores, clicked)
    assert 32 < len(knots) <= MAX_KNOTS
    assert np.interp(scores, knots, relevance).mean() == pytest.approx(clicked.mean(), abs=0.005)


def test_a_lucky_pair_at_the_top_does_not_promise_certainty():
    scores = np.arange(100.0)
    clicked = np.zeros(100, bool)
    clicked[[50, 99]] = True
    _, relevance = fit_curve(scores, clicked)
    assert relevance.max() <= 2 / 20


@pytest.mark.parametrize("clicked", [np.zeros(30, bool), np.ones(30, bool)])
def test_clicks_all_alike_give_a_level_curve(clicked: np.ndarray):
    knots, relevance = fit_curve(np.arange(30.0), clicked)
    assert len(knots) == 1
    assert relevance[0] == clicked.mean()


def test_cross_fitting_judges_no_pair_by_itself():
    """Clicks drawn without regard to the score: in sample a curve seems to know something."""
    rng = np.random.default_rng(3)
    scores, clicked = rng.random(400), rng.random(400) < 0.5
    half = np.arange(400) % 2 == 0
    inside = np.interp(scores, *fit_curve(scores, clicked))
    outside = cross_fitted(scores, clicked, half)
    assert ((outside - clicked) ** 2).mean() > ((inside - clicked) ** 2).mean()
    changed = clicked.copy()
    changed[half] = True
    np.testing.assert_array_equal(cross_fitted(scores, changed, half)[half], outside[half])


def test_the_error_of_calibration_by_hand():
    predicted = np.array([0.05, 0.05, 0.95, 1.0])
    ece, bins = reliability(predicted, np.array([False, True, True, True]))
    assert ece == pytest.approx((2 * 0.45 + 2 * 0.025) / 4)
    assert [one.pairs for one in bins] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert (bins[0].predicted, bins[0].clicked, bins[9].clicked) == (0.05, 0.5, 1.0)


def test_a_calibration_is_better_than_a_constant_and_says_how_good_it_is():
    record = calibrate(*served())
    assert record is not None
    assert (record.queries, record.pairs, record.depth) == (200, 4000, 20)
    assert record.brier < 0.6 * record.brier_constant
    assert record.ece < 0.05
    assert sum(one.pairs for one in record.bins) == 4000


def test_too_little_to_tell_a_share_by_gives_none():
    rows, scores, truth = served()
    assert calibrate(rows[:49], scores[:49], truth[:49]) is None
    assert calibrate(rows, scores, truth * 0) is None


def test_equal_input_gives_equal_calibration():
    assert calibrate(*served()) == calibrate(*served())


@pytest.mark.parametrize("wanted", [0.0, 1e-6, 0.013, 0.2, 0.5, 0.77, 0.9, 1.0])
def test_the_least_score_keeps_exactly_those_with_the_relevance(wanted: float):
    record = calibrate(*served())
    assert record is not None
    curve = Relevance(record)
    rng = np.random.default_rng(1)
    scores = np.concatenate([rng.uniform(-2, 2, 5000), record.scores, [-2, 2]]).astype(np.float32)
    least = np.float32(curve.least_score(wanted))
    if np.isfinite(least):
        scores = np.append(scores, [least, np.nextafter(least, np.float32(-9))]).astype(np.float32)
    np.testing.assert_array_equal(scores >= least, curve.of(scores) >= np.float32(wanted))


def test_relevance_never_falls_as_the_score_rises():
    record = calibrate(*served())
    assert record is not None
    relevance = Relevance(record).of(np.linspace(-2, 2, 10_001, dtype=np.float32))
    assert (np.diff(relevance) >= 0).all()
    assert (relevance.min(), relevance.max()) == pytest.approx((record.relevance[0], record.relevance[-1]))


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [0.1, 0.1]},
        {"scores": [0.2, 0.1]},
        {"relevance": [0.5, 0.5]},
        {"relevance": [0.5, 0.4]},
        {"relevance": [0.5, 1.1]},
        {"relevance": [0.5]},
        {"scores": [], "relevance": []},
        {"scores": [0.0, float("nan")]},
        {"scores": [i / 65 for i in range(65)], "relevance": [i / 65 for i in range(65)]},
        {"brier": 1.5},
        {"unknown": 1},
    ],
)
def test_a_curve_that_is_none_is_refused(change: dict):
    good = {
        "scores": [0.1, 0.2],
        "relevance": [0.1, 0.9],
        "depth": 100,
        "queries": 50,
        "pairs": 5000,
        "clicked": 100,
        "brier": 0.1,
        "brier_constant": 0.2,
        "ece": 0.0,
        "bins": [],
    }
    CalibrationRecord.model_validate(good)
    with pytest.raises(ValidationError):
        CalibrationRecord.model_validate(good | change)
