"""Every loss a configuration can name, against loops over one query and one label in double precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from trainer.config import LossName
from trainer.losses.bce import bce, summed_bce
from trainer.losses.by_name import LOSSES, loss_at
from trainer.losses.infonce import infonce
from trainer.losses.pal import pal
from trainer.losses.pol import pol
from trainer.losses.supcon import supcon
from trainer.losses.triplet import triplet

Tensor = torch.Tensor
Row = list[float]


def log_softmax(s: Row, p: int) -> float:
    top = max(s)
    return s[p] - top - math.log(sum(math.exp(x - top) for x in s))


def positives_of(y: Row) -> list[int]:
    return [j for j in range(len(y)) if y[j] > 0]


def row_supcon(s: Row, y: Row) -> float:
    return row_pal(s, y) / sum(y)


def row_pal(s: Row, y: Row) -> float:
    return -sum(y[p] * log_softmax(s, p) for p in positives_of(y))


def row_decoupled(s: Row, y: Row) -> float:
    negatives = [s[j] for j in range(len(s)) if y[j] == 0]
    return -sum(y[p] * log_softmax([s[p], *negatives], 0) for p in positives_of(y)) / sum(y)


def row_infonce(s: Row, y: Row) -> float:
    return -log_softmax(s, y.index(max(y)))


def row_triplet(s: Row, y: Row) -> float:
    """Margin 0.3, at most three negatives."""
    negatives = sorted((s[j] for j in range(len(s)) if y[j] == 0), reverse=True)[:3]
    total = 0.0
    for p in positives_of(y):
        hinges = [max(0.0, 0.3 - s[p] + n) for n in negatives]
        total += y[p] * sum(hinges) / max(len(hinges), 1)
    return total / sum(y)


def row_summed_bce(s: Row, y: Row) -> float:
    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))

    shifted = [x - math.log(len(s)) for x in s]
    return -sum(
        target * log_sigmoid(x) + (1 - target) * log_sigmoid(-x) for x, target in zip(shifted, y, strict=True)
    )


BY_ROW: dict[LossName, Callable[[Row, Row], float]] = {
    "supcon": row_supcon,
    "pal": row_pal,
    "decoupled": row_decoupled,
    "infonce": row_infonce,
    "triplet": row_triplet,
    "bce": row_summed_bce,
}
NAMES = sorted(LOSSES)
BY_NAME = pytest.mark.parametrize("name", NAMES)


def naive(name: LossName, s: list[Row], y: list[Row], w: Row | None) -> float:
    """Σ w_i l_i / Σ w_i over the rows that count."""
    rows = [i for i in range(len(s)) if name == "bce" or any(y[i])]
    weights = [1.0 if w is None else w[i] for i in rows]
    if not sum(weights):
        return 0.0
    return sum(BY_ROW[name](s[i], y[i]) * weight for i, weight in zip(rows, weights, strict=True)) / sum(
        weights
    )


@st.composite
def problems(draw: st.DrawFn, largest: float = 30.0) -> tuple[list[Row], list[Row], Row | None]:
    """Scores, targets (hard or soft, rows of none and of all among them), weights of the rows or None."""
    n, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    # Steps of 1/64 are exact in float32, and ties are frequent.
    score = st.integers(-64 * int(largest), 64 * int(largest)).map(lambda x: x / 64)
    hard = st.lists(st.sampled_from([0.0, 1.0]), min_size=m, max_size=m)
    soft = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.75, 1.0]), min_size=m, max_size=m)
    kind = st.one_of(hard, soft, st.just([0.0] * m), st.just([1.0] * m))
    weights = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=n, max_size=n)
    return (
        draw(st.lists(st.lists(score, min_size=m, max_size=m), min_size=n, max_size=n)),
        draw(st.lists(kind, min_size=n, max_size=n)),
        draw(st.none() | weights),
    )


def test_each_name_has_a_loss():
    assert set(LOSSES) == set(get_args(LossName))
    assert set(BY_ROW) == set(LOSSES) - {"pol"}


@pytest.mark.parametrize("name", sorted(BY_ROW))
@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_value_is_that_of_the_loop(name, problem):
    s, y, w = problem
    expected = naive(name, s, y, w)
    # torch's softplus, in `decoupled`, is 2e-9 off at 20.
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 3e-5)):
        weights = None if w is None else torch.tensor(w, dtype=dtype)
        value = LOSSES[name](torch.tensor(s, dtype=dtype), torch.tensor(y, dtype=dtype), weights)
        assert value.shape == ()
        assert value.dtype == dtype
        assert value.item() == pytest.approx(expected, rel=tolerance, abs=tolerance)


@BY_NAME
@given(problem=problems(largest=1e6))
@settings(max_examples=40, deadline=None)
def test_value_and_gradient_are_finite_in_single_precision(name, problem):
    s, y, w = problem
    scores = torch.tensor(s, dtype=torch.float32, requires_grad=True)
    weights = None if w is None else torch.tensor(w)
    for one, other in ((scores, torch.tensor(y)), (scores.T, torch.tensor(y).T)):
        value = loss_at(name, 0.05)(one, other, weights if one is scores else None)
        assert torch.isfinite(value)
        assert value >= 0
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, scores)
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bce"])
@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_rows_without_positives_count_for_nothing(name, problem):
    s, y, w = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in problem)
    with_some = (y > 0).any(1)
    scores = s.clone().requires_grad_()
    torch.manual_seed(0)
    value = LOSSES[name](scores, y, w)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, scores)
        assert not gradient[~with_some].any()
    if name != "pol":  # what is drawn for one row depends on the rows before
        alone = LOSSES[name](s[with_some], y[with_some], None if w is None else w[with_some])
        assert value.item() == pytest.approx(alone.item(), abs=1e-12)
    elif not with_some.any():
        assert value == 0


@BY_NAME
@given(problem=problems(largest=4))
@settings(max_examples=8, deadline=None)
def test_gradcheck(name, problem):
    s, y, w = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in problem)
    # Apart from ties and from the hinge's corner, where there is no gradient to check.
    steps = torch.linspace(0.0, 0.01, s.numel(), dtype=torch.float64).reshape(s.shape)
    scores = (s + steps).requires_grad_()

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return LOSSES[name](x, y, w)

    assert gradcheck(value, (scores,), eps=1e-7, atol=1e-5)


def test_pal_counts_a_row_by_its_positives_and_supcon_does_not():
    y = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    s = torch.tensor([[0.3, 0.1, -0.2, 1.0]])
    assert torch.allclose(pal(s, y), 3 * supcon(s, y))
    assert torch.allclose(pal(s, y / 2), 1.5 * supcon(s, y / 2))


def drawn_by(s: Tensor, y: Tensor) -> Tensor:
    """The column that each row of `pol` drew: its gradient is softmax minus one there."""
    scores = s.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(pol(scores, y), scores)
    return (torch.softmax(s, 1) - len(s) * gradient).argmax(1)


def test_pol_draws_positives_in_proportion_to_their_targets():
    y = torch.tensor([[0.0, 1.0, 0.25, 0.0, 0.75]], dtype=torch.float64).expand(20_000, 5)
    torch.manual_seed(0)
    counts = Counter(drawn_by(torch.zeros_like(y), y).tolist())
    assert set(counts) == {1, 2, 4}
    for column, share in ((1, 0.5), (2, 0.125), (4, 0.375)):
        assert counts[column] / 20_000 == pytest.approx(share, abs=0.012)  # about 3.5 standard errors


@given(problem=problems(largest=5), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_pol_is_the_softmax_of_one_positive_of_each_row(problem, seed):
    s, y, _ = problem
    assume(all(map(any, y)))
    scores, targets = (torch.tensor(x, dtype=torch.float64) for x in (s, y))
    torch.manual_seed(seed)
    drawn = drawn_by(scores, targets).tolist()
    assert all(y[i][p] > 0 for i, p in enumerate(drawn))
    torch.manual_seed(seed)
    expected = -sum(log_softmax(s[i], p) for i, p in enumerate(drawn)) / len(s)
    assert pol(scores, targets).item() == pytest.approx(expected, abs=1e-9)


def test_pol_is_supcon_in_the_mean():
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(1, 6, generator=generator, dtype=torch.float64).expand(20_000, 6)
    y = torch.tensor([[1.0, 0.0, 0.5, 0.25, 0.0, 1.0]], dtype=torch.float64).expand(20_000, 6)
    torch.manual_seed(0)
    assert pol(s, y).item() == pytest.approx(supcon(s, y).item(), abs=0.03)


def test_pol_draws_anew_in_every_step_and_the_same_from_the_same_seed():
    y = torch.ones(50, 8)
    s = torch.randn(50, 8)
    torch.manual_seed(3)
    first, second = pol(s, y), pol(s, y)
    assert first != second
    torch.manual_seed(3)
    assert pol(s, y) == first


def test_infonce_holds_further_positives_down_and_takes_the_first_of_equals():
    s = torch.zeros(1, 4, requires_grad=True)
    for y, positive in (([0.0, 1.0, 1.0, 0.0], 1), ([0.5, 0.25, 0.75, 0.0], 2)):
        (gradient,) = torch.autograd.grad(infonce(s, torch.tensor([y])), s)
        assert gradient[0, positive] < 0
        assert (gradient[0] > 0).sum() == 3


def test_triplet_wants_each_positive_above_the_three_hardest_negatives_by_the_margin():
    y = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    s = torch.tensor([[0.5, 0.1, 0.3, 0.4, -0.9]], requires_grad=True)
    value = triplet(s, y)
    assert value.item() == pytest.approx((0.0 + 0.1 + 0.2) / 3)
    (gradient,) = torch.autograd.grad(value, s)
    assert torch.allclose(gradient, torch.tensor([[-2.0, 0.0, 1.0, 1.0, 0.0]]) / 3)
    assert triplet(s, y, hardest=1).item() == pytest.approx(0.2)
    assert triplet(torch.tensor([[0.8, 0.5]]), torch.tensor([[1.0, 0.0]])) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0])
def test_the_margin_is_between_cosines_at_any_temperature(temperature):
    torch.manual_seed(0)
    cosines, y = 2 * torch.rand(5, 9) - 1, (torch.rand(5, 9) < 0.3).float()
    value = loss_at("triplet", temperature)(cosines / temperature, y, None)
    assert temperature * value.item() == pytest.approx(triplet(cosines, y).item(), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "triplet"])
def test_other_losses_know_no_temperature(name):
    assert loss_at(name, 0.05) is LOSSES[name]


def test_the_summed_bce_pulls_a_positive_alike_among_few_labels_and_many():
    def pull(loss: Callable[[Tensor, Tensor], Tensor], labels: int) -> float:
        s = torch.zeros(2, labels, requires_grad=True)
        y = torch.zeros(2, labels)
        y[0, 0] = 1.0
        (gradient,) = torch.autograd.grad(loss(s, y), s)
        return gradient[0, 0].item()

    assert pull(summed_bce, 10) == pytest.approx(-0.5 * 10 / 11)
    assert pull(summed_bce, 100_000) == pytest.approx(-0.5, abs=1e-5)
    assert pull(bce, 10) == pytest.approx(-0.025)
    s, y = torch.randn(3, 7), torch.rand(3, 7)
    assert torch.allclose(summed_bce(s, y), 7 * bce(s - math.log(7), y))


def test_scores_of_zero_expect_one_positive_among_all_labels():
    """Σ_j σ(-log m) is m / (m + 1), whatever m is, so the loss starts near 1 + log m, not at m log 2."""
    y = torch.zeros(4, 50_000)
    y[:, 7] = 1.0
    assert summed_bce(torch.zeros_like(y), y).item() == pytest.approx(1 + math.log(50_000), abs=1e-2)
