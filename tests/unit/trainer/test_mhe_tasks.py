"""Multi-Head Encoding on tasks of the other two sorts: it learns them, and the product does with few rows."""

from __future__ import annotations

import pytest

from bench.mhe_tasks import pretraining_task, single_label_task


def test_short_heads_learn_a_single_label_task():
    plain, *products = single_label_task(100, classes=40)
    assert plain["accuracy"] > 90
    for found in products:
        # Two heads of 8 and 5 rows, or three of 4, 4 and 3, against 40; guessing gives 2.5%.
        assert found["accuracy"] > 75
        assert found["parameters of the classifier"] <= 128 * 13 < plain["parameters of the classifier"]


def test_sampled_groups_learn_the_next_token():
    softmax, *sampled = pretraining_task(100, vocabulary=800)
    assert softmax["best possible"] == pytest.approx(70)
    # At most 512 of the 800 tokens are scored a step in the last.
    for found in [softmax, *sampled]:
        # Guessing the most frequent token gives less than 5%.
        assert 30 < found["accuracy"] <= 80
        assert found["parameters of the classifier"] == 800 * 64
