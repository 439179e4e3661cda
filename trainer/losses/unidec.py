"""The four terms of Algorithm 1, joined."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.config import LossConfig
from trainer.losses.bce import bce
from trainer.losses.decoupled import decoupled
from trainer.losses.supcon import supcon

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MULTI_CLASS: dict[str, Loss] = {"supcon": supcon, "decoupled": decoupled}


def symmetric(loss: Loss, scores: torch.Tensor, positives: torch.Tensor, q2l: float) -> torch.Tensor:
    """λ·loss(queries to labels) + (1-λ)·loss(labels to queries), with λ = `q2l`."""
    return q2l * loss(scores, positives) + (1 - q2l) * loss(scores.T, positives.T)


def unidec_loss(
    phi_d_x: torch.Tensor,
    phi_d_z: torch.Tensor,
    phi_c_x: torch.Tensor,
    psi: torch.Tensor,
    positives: torch.Tensor,
    config: LossConfig,
) -> dict[str, torch.Tensor]:
    """L = λ·L_D + (1-λ)·L_C and its parts (UniDEC, Algorithm 1).

    Args:
        phi_d_x: Φ_D of the queries, float (n, d/2), unit length.
        phi_d_z: Φ_D of the label pool L_B, float (m, d/2), unit length.
        phi_c_x: Φ_C of the queries, float (n, d/2).
        psi: Ψ's rows of the label pool, float (m, d/2).
        positives: P^B, float (n, m).
        config: weights, temperatures and kinds.

    Returns:
        scalars under `total`, `dual_encoder`, `classifier`.
    """
    if config.normalise_classifier:
        phi_c_x = torch.nn.functional.normalize(phi_c_x, dim=1)
        psi = torch.nn.functional.normalize(psi, dim=1)
    scores_d = phi_d_x @ phi_d_z.T / config.temperature
    scores_c = phi_c_x @ psi.T / config.classifier_temperature
    loss_d = symmetric(MULTI_CLASS[config.dual_encoder], scores_d, positives, config.dual_encoder_q2l)
    loss_c = symmetric(MULTI_CLASS[config.classifier], scores_c, positives, config.classifier_q2l)
    if config.auxiliary_bce:
        loss_c = loss_c + config.auxiliary_bce * bce(scores_c, positives)
    total = config.weight * loss_d + (1 - config.weight) * loss_c
    return {"total": total, "dual_encoder": loss_d, "classifier": loss_c}
