from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.row_adam import RowAdam


def table(rows: int = 7, width: int = 3, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).double())


def sparse(rows: list[int], values: torch.Tensor, size: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, size, check_invariants=True)


def gradients(steps: int, rows: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(rows, width, generator=generator).double() for _ in range(steps)]


def test_it_is_adam_where_every_step_touches_every_row():
    mine, theirs = table(), table()
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-7}
    rows, adam = RowAdam([mine], **options), torch.optim.Adam([theirs], **options)
    for gradient in gradients(25, 7, 3):
        mine.grad = sparse(list(range(7)), gradient, mine.shape)
        theirs.grad = gradient
        rows.step()
        adam.step()
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-9)


def test_each_row_is_adam_on_its_own_updates():
    # Row r is touched in the steps that r + 1 divides; Adam on that row alone sees those steps only.
    mine = table()
    rows = RowAdam([mine], lr=0.1)
    alone = [nn.Parameter(mine[r].detach().clone()) for r in range(7)]
    adams = [torch.optim.Adam([row], lr=0.1) for row in alone]
    for step, gradient in enumerate(gradients(24, 7, 3)):
        touched = [r for r in range(7) if step % (r + 1) == 0]
        mine.grad = sparse(touched, gradient[touched], mine.shape)
        rows.step()
        for r in touched:
            alone[r].grad = gradient[r]
            adams[r].step()
    assert torch.allclose(mine, torch.stack(list(alone)), rtol=1e-5, atol=1e-8)


def test_untouched_rows_and_their_moments_stay_bit_equal():
    mine = table()
    optimiser = RowAdam([mine], lr=0.1)
    mine.grad = sparse([0, 1, 2], torch.ones(3, 3).double(), mine.shape)
    optimiser.step()
    before = {name: value.clone() for name, value in optimiser.state[mine].items()} | {
        "table": mine.detach().clone()
    }
    mine.grad = sparse([2, 5], torch.ones(2, 3).double(), mine.shape)
    optimiser.step()
    after = optimiser.state[mine] | {"table": mine.detach()}
    for name, value in before.items():
        changed = (value != after[name]).reshape(7, -1).any(1)
        assert changed.tolist() == [False, False, True, False, False, True, False], name
    assert optimiser.state[mine]["updates"].tolist() == [1, 1, 2, 0, 0, 1, 0]


def test_a_late_first_update_is_as_large_as_adams_first():
    mine = table()
    optimiser = RowAdam([mine], lr=0.1)
    for _ in range(50):
        mine.grad = sparse([0], torch.ones(1, 3).double(), mine.shape)
        optimiser.step()
    before = mine[6].detach().clone()
    mine.grad = sparse([6], 1e-3 * torch.ones(1, 3).double(), mine.shape)
    optimiser.step()
    assert torch.allclose(before - mine[6], torch.full((3,), 0.1).double(), rtol=1e-3)


def test_repeated_rows_are_one_update_of_their_sum():
    twice, once = table(), table()
    for parameter, grad in (
        (twice, sparse([3, 1, 3], torch.tensor([[1.0] * 3, [4.0] * 3, [2.0] * 3]).double(), twice.shape)),
        (once, sparse([1, 3], torch.tensor([[4.0] * 3, [3.0] * 3]).double(), once.shape)),
    ):
        parameter.grad = grad
        optimiser = RowAdam([parameter], lr=0.1)
        optimiser.step()
        assert optimiser.state[parameter]["updates"].tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert torch.equal(twice, once)


def test_an_embeddings_own_gradient_drives_it():
    torch.manual_seed(0)
    embedding = nn.Embedding(1000, 4, sparse=True)
    start = embedding.weight.detach().clone()
    optimiser = RowAdam(embedding.parameters(), lr=0.05)
    wanted = torch.ones(3, 4)
    ids = torch.tensor([7, 7, 500, 999])
    first = None
    for _ in range(200):
        optimiser.zero_grad()
        loss = (embedding(ids) - wanted[[0, 0, 1, 2]]).square().mean()
        first = first or loss.item()
        loss.backward()
        optimiser.step()
    assert loss.item() < 1e-3 * first
    untouched = torch.ones(1000, dtype=torch.bool)
    untouched[ids] = False
    assert torch.equal(embedding.weight[untouched], start[untouched])


def test_parameters_without_gradient_are_left_alone():
    mine = table()
    before = mine.detach().clone()
    RowAdam([mine], lr=0.1).step()
    assert torch.equal(mine, before)


def test_dense_gradients_and_closures_are_refused():
    mine = table()
    optimiser = RowAdam([mine], lr=0.1)
    mine.grad = torch.ones_like(mine)
    with pytest.raises(ValueError, match="sparse"):
        optimiser.step()
    with pytest.raises(ValueError, match="closure"):
        optimiser.step(lambda: 0.0)
