from __future__ import annotations

import pytest
import torch

from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import TextBatch
from trainer.model import DualHeadModel


def encoder(dropout: float = 0.0, word_dropout: float = 0.0) -> BagEncoder:
    torch.manual_seed(0)
    made = BagEncoder(40, 6, dropout, word_dropout)
    torch.nn.init.normal_(made.residual.weight)
    torch.nn.init.normal_(made.residual.bias)
    return made


def batch(lengths: list[int], width: int = 5) -> TextBatch:
    ids = torch.randint(1, 40, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return TextBatch(ids * mask, mask)


LENGTHS = {"mixed": [3, 5, 1], "empty texts": [0, 2, 0, 5, 0], "only empty texts": [0, 0], "one": [4]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_training_and_serving_paths_agree(lengths):
    made, texts = encoder(0.3, 0.3).eval(), batch(lengths)
    assert torch.allclose(made.encode(texts), made(texts.ids, texts.mask), atol=1e-6)


def test_phi_is_the_mean_and_its_residual():
    made, texts = encoder().eval(), batch([3, 0, 5])
    phi = made(texts.ids, texts.mask)
    for row, length in enumerate([3, 0, 5]):
        words = made.words.weight[texts.ids[row, :length]]
        v = words.sum(0) / length if length else torch.zeros(6)
        assert torch.allclose(
            phi[row], v + torch.relu(made.residual.weight @ v + made.residual.bias), atol=1e-6
        )


def test_padding_changes_nothing():
    made, texts = encoder().eval(), batch([3, 1, 2])
    wide = torch.nn.functional.pad(texts.ids, (0, 4), value=7), torch.nn.functional.pad(texts.mask, (0, 4))
    assert torch.allclose(made(texts.ids, texts.mask), made(*wide), atol=1e-6)
    assert torch.allclose(made.encode(texts), made.encode(TextBatch(*wide)), atol=1e-6)


def test_both_paths_have_the_same_gradient_and_it_is_sparse():
    made, texts = encoder(), batch([3, 0, 5])
    grads = []
    for run in (lambda: made.encode(texts), lambda: made(texts.ids, texts.mask)):
        made.zero_grad()
        run().square().sum().backward()
        gradient = made.words.weight.grad
        assert gradient.is_sparse
        grads.append(gradient.to_dense())
    assert torch.allclose(*grads, atol=1e-5)
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[texts.ids[texts.mask > 0]] = False
    assert not grads[0][untouched].any()


def test_word_dropout_is_for_training_only():
    made, texts = encoder(word_dropout=0.5), batch([5] * 200)
    assert torch.equal(made.eval().encode(texts), made.eval().encode(texts))
    made.train()
    torch.manual_seed(0)
    first = made.encode(texts)
    assert not torch.equal(first, made.encode(texts))
    torch.manual_seed(0)
    assert torch.equal(first, made.encode(texts))
    assert torch.isfinite(first).all()


def test_an_empty_text_has_finite_vectors_and_gradients():
    model = DualHeadModel(encoder(), [(4, 4)], 0.1)
    ((phi_d, phi_c),) = model.encode(batch([0, 0]))
    (phi_d.sum() + phi_c.sum()).backward()
    assert torch.isfinite(phi_d).all()
    assert all(torch.isfinite(p.grad.to_dense()).all() for p in model.parameters() if p.grad is not None)


def test_phi_d_has_unit_length_and_phi_c_has_not():
    model = DualHeadModel(encoder(), [(4, 4)], 0.1).eval()
    texts = batch([3, 5, 1])
    ((phi_d, phi_c),) = model(texts.ids, texts.mask)
    assert phi_d.shape == phi_c.shape == (3, 4)
    assert torch.allclose(phi_d.norm(dim=1), torch.ones(3))
    assert not torch.allclose(phi_c.norm(dim=1), torch.ones(3), atol=0.05)
    (served,) = model.query_vectors(texts.ids, texts.mask)
    assert torch.allclose(served[:, :4], phi_d)
    assert torch.allclose(served[:, 4:], phi_c / phi_c.norm(dim=1, keepdim=True), atol=1e-6)
