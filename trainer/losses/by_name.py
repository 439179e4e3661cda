"""The loss that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from trainer.config import LossName
from trainer.losses.bce import summed_bce
from trainer.losses.decoupled import decoupled
from trainer.losses.infonce import infonce
from trainer.losses.pal import pal
from trainer.losses.pol import pol
from trainer.losses.supcon import supcon
from trainer.losses.triplet import MARGIN, triplet

# Scores (n, m) over their temperature, positives (n, m), row weights (n,) or None, to a scalar.
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# `triplet` with the margin for a temperature of 1: `loss_at` fits it to any other.
LOSSES: dict[LossName, Loss] = {
    "supcon": supcon,
    "pal": pal,
    "decoupled": decoupled,
    "pol": pol,
    "infonce": infonce,
    "triplet": triplet,
    "bce": summed_bce,
}


def loss_at(name: LossName, temperature: float) -> Loss:
    """The named loss for scores that were divided by `temperature`.

    NGAME's margin of 0.3 is between cosines, so `triplet` takes it in the unit of such scores.
    """
    if name == "triplet":
        return partial(triplet, margin=MARGIN / temperature)
    return LOSSES[name]
