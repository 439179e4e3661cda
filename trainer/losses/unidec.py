"""The terms of Algorithm 1 for one pair of heads, and what joins a narrow and a wide pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import kl_div, log_softmax, normalize

from trainer.config import LossConfig
from trainer.losses.bce import bce
from trainer.losses.by_name import Loss, loss_at

# Low beside any score over any temperature, and finite, since an infinite one turns a zero target into NaN.
_UNSEEN = -1e4


@dataclass(frozen=True)
class Scores:
    """Scores of a batch by one pair of heads, divided by their temperatures; None where a head is off.

    Attributes:
        dual_encoder: float (n, m), Φ_D of the queries with Φ_D of the pool L_B.
        classifier: float (n, m'), Φ_C of the queries with Ψ of the classifier's pool.
        served: float (n, m), the sum of both cosines on L_B, divided by the dual encoder's temperature; None,
            too, where neither classifier nor loss needs cosines.
    """

    dual_encoder: torch.Tensor | None
    classifier: torch.Tensor | None
    served: torch.Tensor | None


def scores_of(
    phi_d_x: torch.Tensor,
    phi_d_z: torch.Tensor | None,
    phi_c_x: torch.Tensor,
    psi: torch.Tensor | None,
    columns: torch.Tensor | None,
    config: LossConfig,
) -> Scores:
    """Scores of a batch by one pair of heads.

    Args:
        phi_d_x: Φ_D of the queries, float (n, d), unit length.
        phi_d_z: Φ_D of the pool L_B, float (m, d), unit length; None where the dual encoder is off.
        phi_c_x: Φ_C of the queries, float (n, c).
        psi: Ψ's rows of the classifier's pool, float (m', c); None where the classifier is off.
        columns: int64 (m,), where L_B's labels stand in the classifier's pool; None: the pools are one.
        config: temperatures, and whether the classifier is scored by cosine.
    """
    scores_d = None if phi_d_z is None else phi_d_x @ phi_d_z.T / config.temperature
    if psi is None:
        return Scores(scores_d, None, None)
    cosines = None
    if config.normalise_classifier or config.served or config.distillation:
        cosines = normalize(phi_c_x, dim=1, eps=1e-12) @ normalize(psi, dim=1, eps=1e-12).T
    raw = cosines if cosines is not None and config.normalise_classifier else phi_c_x @ psi.T
    served = None
    if scores_d is not None and cosines is not None:
        on_pool = cosines if columns is None else cosines[:, columns]
        served = scores_d + on_pool / config.temperature
    return Scores(scores_d, raw / config.classifier_temperature, served)


def without_filtered(
    scores: Scores, filtered: torch.Tensor | None, classifier_filtered: torch.Tensor | None
) -> Scores:
    """The scores, so low where a pair is neither positive nor negative that no loss sees it.

    Args:
        scores: of one pair of heads.
        filtered: bool (n, m) on L_B, or None for no such pair.
        classifier_filtered: bool (n, m') on the classifier's pool, or None.
    """

    def without(matrix: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor | None:
        return matrix if matrix is None or out is None else matrix.masked_fill(out, _UNSEEN)

    return Scores(
        without(scores.dual_encoder, filtered),
        without(scores.classifier, classifier_filtered),
        without(scores.served, filtered),
    )


def symmetric(loss: Loss, scores: torch.Tensor, positives: torch.Tensor, q2l: float) -> torch.Tensor:
    """λ·loss(queries to labels) + (1-λ)·loss(labels to queries), with λ = `q2l`."""
    total = scores.new_zeros(())
    if q2l > 0:
        total = total + q2l * loss(scores, positives, None)
    if q2l < 1:
        total = total + (1 - q2l) * loss(scores.T, positives.T, None)
    return total


def unidec_loss(
    scores: Scores,
    positives: torch.Tensor,
    classifier_positives: torch.Tensor,
    config: LossConfig,
    own_loss: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """L = λ·L_D + (1-λ)·L_C, and a term on the served score where it is asked for (Algorithm 1).

    With one head alone its loss is the whole.

    Args:
        scores: of one pair of heads.
        positives: P^B on L_B, float (n, m).
        classifier_positives: positives on the classifier's pool, float (n, m').
        config: weights, temperatures and kinds.
        own_loss: L_C as the classifier itself defines it (Multi-Head Encoding), instead of a loss of scores.

    Returns:
        scalars under `total`, and under `dual_encoder`, `classifier`, `served` where there are such.
    """
    parts: dict[str, torch.Tensor] = {}
    if scores.dual_encoder is not None:
        parts["dual_encoder"] = symmetric(
            loss_at(config.dual_encoder, config.temperature),
            scores.dual_encoder,
            positives,
            config.dual_encoder_q2l,
        )
    if own_loss is not None:
        parts["classifier"] = own_loss
    elif scores.classifier is not None:
        parts["classifier"] = symmetric(
            loss_at(config.classifier, config.classifier_temperature),
            scores.classifier,
            classifier_positives,
            config.classifier_q2l,
        )
        if config.auxiliary_bce:
            extra = bce(scores.classifier, classifier_positives)
            parts["classifier"] = parts["classifier"] + config.auxiliary_bce * extra
    if len(parts) == 2:
        total = config.weight * parts["dual_encoder"] + (1 - config.weight) * parts["classifier"]
    else:
        (total,) = parts.values()
    if config.served and scores.served is not None:
        parts["served"] = symmetric(
            loss_at(config.dual_encoder, config.temperature),
            scores.served,
            positives,
            config.dual_encoder_q2l,
        )
        total = total + config.served * parts["served"]
    return {"total": total, **parts}


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean over queries of KL(teacher ‖ student) over the label pool; no gradient reaches the teacher.

    Args:
        student: served scores of the narrow heads over their temperature, float (n, m).
        teacher: likewise of the wide heads.
    """
    return kl_div(
        log_softmax(student, 1), log_softmax(teacher.detach(), 1), reduction="batchmean", log_target=True
    )
