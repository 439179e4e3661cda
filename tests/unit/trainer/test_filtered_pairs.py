"""Pairs that a filter file names are neither positives nor negatives of a training step."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from trainer.config import LossConfig, LossName
from trainer.losses.unidec import Scores, unidec_loss, without_filtered
from trainer.sampling import filtered_in_pool


def test_pairs_of_a_batch_and_its_pool():
    filtered = sp.csr_matrix(np.array([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]], dtype=bool))
    out = filtered_in_pool(filtered, np.array([2, 0]), np.array([1, 3]))
    assert out.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("name", get_args(LossName))
@pytest.mark.parametrize("q2l", [1.0, 0.5])
def test_no_loss_sees_a_filtered_pair(name, q2l):
    generator = torch.Generator().manual_seed(0)
    positives = torch.eye(6, 9)
    filtered = torch.zeros(6, 9, dtype=torch.bool)
    filtered[0, 8] = filtered[3, 2] = True
    config = LossConfig(
        dual_encoder=name,
        classifier=name,
        dual_encoder_q2l=q2l,
        classifier_q2l=q2l,
        auxiliary_bce=0.1,
        served=0.1,
    )

    def losses(value: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        generator.manual_seed(1)
        scores = [torch.randn(6, 9, generator=generator) * 8 for _ in range(3)]
        for matrix in scores:
            matrix[filtered] = value
            matrix.requires_grad_()
        torch.manual_seed(0)
        seen = without_filtered(Scores(*scores), filtered, filtered)
        total = unidec_loss(seen, positives, positives, config)["total"]
        total.backward()
        return total, [matrix.grad for matrix in scores]

    low, gradients = losses(-3.0)
    high, _ = losses(40.0)
    assert torch.isfinite(low)
    assert torch.equal(low, high)
    for gradient in gradients:
        assert torch.isfinite(gradient).all()
        assert (gradient[filtered] == 0).all()
        assert gradient.abs().sum() > 0


def test_without_a_filter_scores_stay_as_they_are():
    scores = Scores(torch.ones(2, 2), None, None)
    assert without_filtered(scores, None, None).dual_encoder is scores.dual_encoder
