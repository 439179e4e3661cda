"""Weights of the halves: when another than 1:1 is taken, and what they do to vectors and scores."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from export.blend import GRID, blend, choose_weight, worth
from export.vectors import LabelVectors


def truth_of(labels: list[list[int]], count: int) -> sp.csr_matrix:
    rows = np.repeat(np.arange(len(labels)), [len(one) for one in labels])
    columns = np.concatenate([np.array(one, dtype=np.int64) for one in labels])
    return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(len(labels), count))


def test_the_worth_of_an_answer_is_three_figures_added():
    ranking = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]])
    found = worth(ranking, truth_of([[0, 4, 30, 31], [30]], 32))
    assert found == pytest.approx([100 + 40 + 50, 0.0])


def answers(right: np.ndarray) -> np.ndarray:
    """Rankings of 100 queries whose one relevant phrase, 0, is first where `right`, and nowhere otherwise."""
    rows = np.tile(np.arange(1, 11), (len(right), 1))
    rows[right, 0] = 0
    return rows


@pytest.mark.parametrize(("more", "taken"), [(30, 1.4), (1, 1.0), (0, 1.0)])
def test_another_weight_must_gain_more_than_the_noise_of_the_queries(more: int, taken: float):
    """1.4 answers `more` further queries than 1:1 does. A single one is within its standard error."""
    truth = truth_of([[0]] * 100, 11)

    def ranking(weight: float) -> np.ndarray:
        return answers(np.arange(100) < (40 + more if weight == 1.4 else 40 if weight == 1.0 else 20))

    found = choose_weight(ranking, truth)
    assert found.encoder == taken
    assert found.pair == (taken, 2 - taken)
    assert [point.encoder for point in found.curve] == list(GRID)
    # Each further query is worth 100 + 20 + 100; of 100 queries one in 100 makes 2.2.
    gain = next(point for point in found.curve if point.encoder == 1.4)
    assert gain.gain == pytest.approx(2.2 * more)
    expected = 220 * np.sqrt(more * (100 - more) / 99) / 100
    assert gain.error == pytest.approx(expected, abs=1e-3)


def test_a_gain_that_some_queries_pay_for_is_noise():
    """30 queries won and 28 lost: a gain of 4.4 points, whose standard error over the queries is 16.8."""
    truth = truth_of([[0]] * 100, 11)

    def ranking(weight: float) -> np.ndarray:
        return answers(np.arange(100) < 30 if weight == 0.6 else (np.arange(100) >= 72))

    found = choose_weight(ranking, truth)
    assert found.encoder == 1.0
    assert "within its standard error" in found.reason


def test_of_equally_good_weights_the_nearest_to_even_is_taken():
    """1.6 answers 72 of 100 queries, 1.4 other 70 of them, 1.2 and 1:1 the first 40."""
    truth = truth_of([[0]] * 100, 11)
    right = {1.6: np.arange(100) < 72, 1.4: np.arange(100) >= 30}

    def ranking(weight: float) -> np.ndarray:
        return answers(right.get(weight, np.arange(100) < 40))

    found = choose_weight(ranking, truth)
    assert found.encoder == 1.4
    assert "gains 66.00 points" in found.reason
    assert "1.6 is 4.40 points ahead, within its standard error" in found.reason


@pytest.mark.parametrize("encoder_dim", [0, 4])
def test_a_model_of_one_head_has_no_halves_to_weigh(encoder_dim: int):
    labels = LabelVectors(np.ones((3, 4), np.float32), None)
    found, record = blend(labels, encoder_dim, None, None, 1.4)
    assert record is None
    assert found is labels
    assert (labels.narrow == 1).all()
