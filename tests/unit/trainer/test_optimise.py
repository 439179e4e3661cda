from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from trainer.classifiers.table import TableClassifier
from trainer.config import OptimiserConfig
from trainer.encoders.bag import BagEncoder
from trainer.model import DualHeadModel
from trainer.optimise import learning_rate_factor, make_optimisers, set_rates
from trainer.row_adam import RowAdam


def test_warm_up_then_cosine():
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(factors[10:]))
    assert 0 < factors[-1] < 1e-3


@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 0.99])
def test_short_runs_have_sound_rates(total, warmup):
    factors = [learning_rate_factor(step, total, warmup) for step in range(total)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[0] > 0


def test_each_part_has_its_rate():
    model = DualHeadModel(BagEncoder(50, 8, 0.0, 0.0), [(2, 2)], 0.1)
    table = TableClassifier(20, 2)
    config = OptimiserConfig(encoder_lr=1.0, heads_lr=2.0, table_lr=3.0, weight_decay=0.5)
    optimisers = make_optimisers(model, table, config)
    rates = {
        id(parameter): (type(optimiser), group["lr"], group.get("weight_decay", 0.0))
        for optimiser in optimisers
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    adamw = torch.optim.AdamW
    assert rates == {
        id(model.encoder.words.weight): (RowAdam, 1.0, 0.0),
        id(model.encoder.residual.weight): (adamw, 1.0, 0.5),
        id(model.encoder.residual.bias): (adamw, 1.0, 0.0),
        id(model.heads[0].g1[0].weight): (adamw, 2.0, 0.5),
        id(model.heads[0].g1[0].bias): (adamw, 2.0, 0.0),
        id(model.heads[0].g2[0].weight): (adamw, 2.0, 0.5),
        id(model.heads[0].g2[0].bias): (adamw, 2.0, 0.0),
        id(table.psi.weight): (RowAdam, 3.0, 0.0),
    }
    set_rates(optimisers, 0.25)
    assert sorted({group["lr"] for o in optimisers for group in o.param_groups}) == [0.25, 0.5, 0.75]
    set_rates(optimisers, 1.0)
    assert sorted({group["lr"] for o in optimisers for group in o.param_groups}) == [1.0, 2.0, 3.0]
