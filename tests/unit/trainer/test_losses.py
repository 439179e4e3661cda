"""Losses against loops written from the papers' formulas, one query, label and logarithm at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch.autograd import gradcheck

from trainer.config import LossConfig
from trainer.losses.bce import bce
from trainer.losses.decoupled import decoupled
from trainer.losses.supcon import supcon
from trainer.losses.unidec import distillation_loss, scores_of, unidec_loss

Tensor = torch.Tensor


def mean_of_rows(rows: list[tuple[Tensor, float]]) -> Tensor:
    """Σ w_i l_i / Σ w_i over (loss, weight) of the rows that count."""
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    return sum((loss * weight for loss, weight in rows), start=torch.zeros((), dtype=torch.float64)) / sum(
        weight for _, weight in rows
    )


def naive_supcon(s: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
    """1/|P| Σ_{p∈P} -log( e^{s_ip} / Σ_{j∈L_B} e^{s_ij} )."""
    rows = []
    for i in range(s.shape[0]):
        positives = [j for j in range(s.shape[1]) if y[i, j] > 0]
        if not positives:
            continue
        size = sum(float(y[i, p]) for p in positives)
        loss = torch.zeros((), dtype=torch.float64)
        for p in positives:
            denominator = sum(torch.exp(s[i, j]) for j in range(s.shape[1]))
            loss = loss - y[i, p] * torch.log(torch.exp(s[i, p]) / denominator)
        rows.append((loss / size, 1.0 if w is None else float(w[i])))
    return mean_of_rows(rows)


def naive_decoupled(s: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
    """1/|P| Σ_{p∈P} -log( e^{s_ip} / (e^{s_ip} + Σ_{n∉P} e^{s_in}) )."""
    rows = []
    for i in range(s.shape[0]):
        positives = [j for j in range(s.shape[1]) if y[i, j] > 0]
        negatives = [j for j in range(s.shape[1]) if j not in positives]
        if not positives:
            continue
        size = sum(float(y[i, p]) for p in positives)
        loss = torch.zeros((), dtype=torch.float64)
        for p in positives:
            mine = torch.exp(s[i, p])
            loss = loss - y[i, p] * torch.log(mine / (mine + sum(torch.exp(s[i, n]) for n in negatives)))
        rows.append((loss / size, 1.0 if w is None else float(w[i])))
    return mean_of_rows(rows)


def naive_bce(s: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
    """1/m Σ_j y_j·l(1, s_j) + (1 - y_j)·l(0, s_j): the one-versus-all reduction over the pool."""
    rows = []
    for i in range(s.shape[0]):
        loss = torch.zeros((), dtype=torch.float64)
        for j in range(s.shape[1]):
            probability = 1 / (1 + torch.exp(-s[i, j]))
            loss = loss - y[i, j] * torch.log(probability) - (1 - y[i, j]) * torch.log(1 - probability)
        rows.append((loss / s.shape[1], 1.0 if w is None else float(w[i])))
    return mean_of_rows(rows)


PAIRS = [(supcon, naive_supcon), (decoupled, naive_decoupled), (bce, naive_bce)]
BY_LOSS = pytest.mark.parametrize(("loss", "naive"), PAIRS, ids=["supcon", "decoupled", "bce"])

ROWS = {
    "mixed": [[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]],
    "a row without positives": [[0, 0, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 1]],
    "a row of positives only": [[1, 1, 1, 1, 1], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    "soft targets": [[1.0, 0.3, 0, 0, 0.1], [0, 0.75, 0, 0.25, 0], [0.2, 0, 0, 0, 0]],
    "one column": [[1], [0], [1]],
    "one query": [[0, 1, 0, 1]],
}
BY_ROWS = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())


def scores_like(y: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return scores.requires_grad_()


def value_and_gradient(loss: Callable[..., Tensor], s: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    value = loss(s, *rest)
    if not value.requires_grad:
        return value, torch.zeros_like(s)
    (gradient,) = torch.autograd.grad(value, s)
    return value.detach(), gradient


@BY_ROWS
@BY_LOSS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_value_and_gradient_are_those_of_the_formula(loss, naive, rows, weighted):
    y = torch.tensor(rows, dtype=torch.float64)
    w = torch.tensor([0.5, 2.0, 0.25], dtype=torch.float64)[: len(y)] if weighted else None
    value, gradient = value_and_gradient(loss, scores_like(y), y, w)
    expected, expected_gradient = value_and_gradient(naive, scores_like(y), y, w)
    assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


@BY_ROWS
@BY_LOSS
def test_gradcheck(loss, naive, rows):
    y = torch.tensor(rows, dtype=torch.float64)
    assert gradcheck(lambda s: loss(s, y), (scores_like(y),))
    assert gradcheck(lambda s: loss(s.T, y.T), (scores_like(y),))


@BY_LOSS
def test_a_batch_without_any_positive(loss, naive):
    y = torch.zeros(3, 4, dtype=torch.float64)
    value, gradient = value_and_gradient(loss, scores_like(y), y)
    expected, expected_gradient = value_and_gradient(naive, scores_like(y), y)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert torch.allclose(gradient, expected_gradient, atol=1e-12)


def test_supcon_and_decoupled_are_zero_without_positives():
    y = torch.zeros(3, 4, dtype=torch.float64)
    for loss in (supcon, decoupled):
        value, gradient = value_and_gradient(loss, scores_like(y), y)
        assert value == 0
        assert not gradient.any()


def test_rows_of_weight_zero_count_for_nothing():
    y = torch.tensor(ROWS["mixed"], dtype=torch.float64)
    s = scores_like(y).detach()
    for loss, _ in PAIRS:
        dropped = loss(s, y, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
        assert torch.allclose(dropped, loss(s[[0, 2]], y[[0, 2]]))
        assert loss(s, y, torch.zeros(3, dtype=torch.float64)) == 0


def test_decoupled_spares_a_row_of_positives_only():
    s = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    value, gradient = value_and_gradient(decoupled, s, torch.ones(2, 6, dtype=torch.float64))
    assert value == 0
    assert not gradient.any()


def test_positives_compete_in_supcon_and_not_in_decoupled():
    y = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    near, far = (torch.tensor([[1.0, other, 0.0]], dtype=torch.float64) for other in (1.0, 30.0))
    assert supcon(far, y) > supcon(near, y) + 10
    assert decoupled(far, y) < decoupled(near, y)


@BY_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
def test_extreme_scores_stay_finite(loss, naive, dtype, scale):
    corners = torch.tensor(list(itertools.product([-1.0, 0.0, 1.0], repeat=3)), dtype=dtype)
    for pattern in itertools.product([0.0, 1.0], repeat=3):
        s = (scale * corners).requires_grad_()
        y = torch.tensor([pattern], dtype=dtype).expand(len(s), 3)
        value, gradient = value_and_gradient(loss, s, y)
        assert torch.isfinite(value)
        assert value >= 0
        assert torch.isfinite(gradient).all()


def test_far_scores_reach_their_limits():
    s, y = torch.tensor([[1000.0, -1000.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    assert supcon(s, y).item() == pytest.approx(2000.0)
    assert decoupled(s, y).item() == pytest.approx(2000.0)
    assert bce(s, y).item() == pytest.approx((1000 + 1000 + math.log(2)) / 3)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return sum((a[k] * b[k] for k in range(len(a))), start=torch.zeros((), dtype=torch.float64))


def unit(v: Tensor) -> Tensor:
    return v / torch.sqrt(dot(v, v))


def naive_unidec(
    phi_d_x: Tensor, phi_d_z: Tensor, phi_c_x: Tensor, psi: Tensor, y: Tensor, c: LossConfig
) -> Tensor:
    """Algorithm 1's last lines: four terms, each over its own rows."""
    naive = {"supcon": naive_supcon, "decoupled": naive_decoupled}
    n, m = y.shape

    def table(row: Callable[[int, int], Tensor], rows: int, columns: int) -> Tensor:
        return torch.stack([torch.stack([row(i, j) for j in range(columns)]) for i in range(rows)])

    def score_d(i: int, label: int) -> Tensor:
        return dot(phi_d_x[i], phi_d_z[label]) / c.temperature

    def score_c(i: int, label: int) -> Tensor:
        x, w = phi_c_x[i], psi[label]
        return (
            dot(unit(x), unit(w)) / c.classifier_temperature
            if c.normalise_classifier
            else (dot(x, w) / c.classifier_temperature)
        )

    owners = torch.stack([torch.stack([y[i, label] for i in range(n)]) for label in range(m)])
    d_q2l = naive[c.dual_encoder](table(score_d, n, m), y)
    d_l2q = naive[c.dual_encoder](table(lambda label, i: score_d(i, label), m, n), owners)
    c_q2l = naive[c.classifier](table(score_c, n, m), y)
    c_l2q = naive[c.classifier](table(lambda label, i: score_c(i, label), m, n), owners)
    loss_d = c.dual_encoder_q2l * d_q2l + (1 - c.dual_encoder_q2l) * d_l2q
    loss_c = c.classifier_q2l * c_q2l + (1 - c.classifier_q2l) * c_l2q
    loss_c = loss_c + c.auxiliary_bce * naive_bce(table(score_c, n, m), y)
    return c.weight * loss_d + (1 - c.weight) * loss_c


def algorithm_1(
    phi_d_x: Tensor, phi_d_z: Tensor, phi_c_x: Tensor, psi: Tensor, y: Tensor, config: LossConfig
) -> dict[str, Tensor]:
    scores = scores_of(phi_d_x, phi_d_z, phi_c_x, psi, None, config)
    return unidec_loss(scores, y, y, config)


UNIDEC = {
    "defaults": LossConfig(),
    "weights all different": LossConfig(weight=0.3, dual_encoder_q2l=0.8, classifier_q2l=0.1),
    "two temperatures": LossConfig(temperature=0.2, classifier_temperature=1.5, normalise_classifier=False),
    "decoupled, with bce": LossConfig(
        dual_encoder="supcon", classifier="decoupled", auxiliary_bce=0.7, classifier_temperature=0.5
    ),
    "decoupled encoder": LossConfig(dual_encoder="decoupled", temperature=0.1, dual_encoder_q2l=0.25),
}


@pytest.mark.parametrize("config", UNIDEC.values(), ids=UNIDEC.keys())
def test_the_four_terms_are_those_of_algorithm_1(config):
    generator = torch.Generator().manual_seed(7)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, 3, generator=generator, dtype=torch.float64)

    # One label is a hard negative of all (column without positives), one query lost all its positives.
    y = torch.tensor(
        [[1, 0, 0, 1, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 1]], dtype=torch.float64
    )
    parts = [
        torch.nn.functional.normalize(draw(4), dim=1).requires_grad_(),
        torch.nn.functional.normalize(draw(5), dim=1).requires_grad_(),
        draw(4).requires_grad_(),
        draw(5).requires_grad_(),
    ]
    total = algorithm_1(*parts, y, config)["total"]
    expected = naive_unidec(*parts, y, config)
    assert torch.allclose(total, expected, rtol=1e-11, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(total, parts), torch.autograd.grad(expected, parts), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10)
    assert gradcheck(lambda *p: algorithm_1(*p, y, config)["total"], tuple(parts), atol=1e-4)


def test_lambda_shares_the_loss_between_the_heads():
    torch.manual_seed(0)
    parts = [torch.nn.functional.normalize(torch.randn(n, 4), dim=1) for n in (3, 6, 3, 6)]
    y = (torch.rand(3, 6) < 0.4).float()
    losses = algorithm_1(*parts, y, LossConfig(weight=0.25))
    assert torch.allclose(losses["total"], 0.25 * losses["dual_encoder"] + 0.75 * losses["classifier"])
    alone = algorithm_1(*parts, y, LossConfig(weight=1.0))
    assert torch.equal(alone["total"], alone["dual_encoder"])


def pair_of_heads(seed: int) -> list[Tensor]:
    """Φ_D of 3 queries and 5 labels, Φ_C of the queries, Ψ of 7 labels."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (3, 5, 3, 7)]
    return [torch.nn.functional.normalize(x, dim=1) for x in drawn[:2]] + drawn[2:]


def test_the_served_score_is_the_sum_of_both_cosines_on_the_encoded_pool():
    x_d, z_d, x_c, psi = pair_of_heads(0)
    columns = torch.tensor([0, 2, 3, 5, 6])
    config = LossConfig(temperature=0.1, classifier_temperature=0.7, served=1.0, normalise_classifier=False)
    scores = scores_of(x_d, z_d, x_c, psi, columns, config)
    for i in range(3):
        for j, row in enumerate(columns.tolist()):
            both = dot(x_d[i], z_d[j]) + dot(unit(x_c[i]), unit(psi[row]))
            assert torch.isclose(scores.served[i, j], both / 0.1)
    assert scores.classifier.shape == (3, 7)
    y = torch.zeros(3, 5, dtype=torch.float64)
    y[0, 1] = y[1, 4] = y[2, 0] = 1
    wide_y = torch.zeros(3, 7, dtype=torch.float64)
    wide_y[:, columns] = y
    losses = unidec_loss(scores, y, wide_y, config)
    without = unidec_loss(scores, y, wide_y, config.model_copy(update={"served": 0.0}))
    served = (naive_supcon(scores.served, y) + naive_supcon(scores.served.T, y.T)) / 2
    assert torch.isclose(losses["total"] - without["total"], served)


@pytest.mark.parametrize("present", ["dual_encoder", "classifier"])
def test_a_head_alone_is_the_whole_loss(present):
    x_d, z_d, x_c, psi = pair_of_heads(1)
    y = (torch.rand(3, 7, generator=torch.Generator().manual_seed(2)) < 0.5).double()
    if present == "dual_encoder":
        scores = scores_of(x_d, z_d, x_c, None, None, LossConfig())
        losses = unidec_loss(scores, y[:, :5], y[:, :5], LossConfig(weight=0.1))
    else:
        scores = scores_of(x_d, None, x_c, psi, None, LossConfig())
        losses = unidec_loss(scores, y, y, LossConfig(weight=0.9))
    assert set(losses) == {"total", present}
    assert torch.equal(losses["total"], losses[present])


def test_distillation_is_kl_to_the_teacher_and_leaves_the_teacher_alone():
    student = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    loss = distillation_loss(student, teacher)
    p, q = torch.softmax(teacher, 1), torch.softmax(student, 1)
    assert torch.isclose(loss, (p * (p / q).log()).sum(1).mean())
    loss.backward()
    assert teacher.grad is None
    assert student.grad.abs().sum() > 0
    assert distillation_loss(teacher, teacher).item() == pytest.approx(0.0, abs=1e-12)
