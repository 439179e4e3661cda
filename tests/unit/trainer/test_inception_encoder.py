from __future__ import annotations

import pytest
import torch

from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import TextBatch
from trainer.encoders.inception import InceptionEncoder

WIDTHS = (1, 2, 3, 4)


def encoder(dropout: float = 0.0, word_dropout: float = 0.0) -> InceptionEncoder:
    torch.manual_seed(0)
    made = InceptionEncoder(40, 6, WIDTHS, 5, dropout, word_dropout)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def batch(lengths: list[int], width: int = 5) -> TextBatch:
    ids = torch.randint(1, 40, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return TextBatch(ids * mask, mask)


def naive(made: InceptionEncoder, ids: list[int]) -> torch.Tensor:
    """One text, one filter and one token at a time."""
    zero = torch.zeros(made.width)
    joined = []
    for span, convolution in zip(WIDTHS, made.convolutions, strict=True):
        for weight, bias in zip(convolution.weight, convolution.bias, strict=True):
            features = []
            for centre in range(len(ids)):
                total = bias.clone()
                for offset in range(span):
                    at = centre - (span - 1) // 2 + offset
                    word = made.words.weight[ids[at]] if 0 <= at < len(ids) else zero
                    total = total + weight[:, offset] @ word
                features.append(torch.relu(total))
            joined.append(sum(features) / len(features) if features else torch.tensor(0.0))
    words = [made.words.weight[at] for at in ids]
    v = (sum(words) / len(words) if words else zero) + made.projection.weight @ torch.stack(joined)
    return v + torch.relu(made.residual.weight @ v + made.residual.bias)


def test_phi_is_that_of_the_formula_for_texts_shorter_and_longer_than_the_widths():
    made, lengths = encoder().eval(), [5, 1, 0, 2, 4]
    texts = batch(lengths)
    with torch.no_grad():
        expected = [
            naive(made, row[:length].tolist()) for row, length in zip(texts.ids, lengths, strict=True)
        ]
        for phi in (made(texts.ids, texts.mask), made.encode(texts)):
            assert torch.allclose(phi, torch.stack(expected), atol=1e-4)


@pytest.mark.parametrize("lengths", [[3, 1, 2], [0, 0], [0, 4, 0]])
def test_padding_and_company_change_nothing(lengths):
    made, texts = encoder().eval(), batch(lengths)
    # What stands behind the mask is never looked at.
    ids, mask = (
        torch.nn.functional.pad(texts.ids, (0, 6), value=7),
        torch.nn.functional.pad(texts.mask, (0, 6)),
    )
    with torch.no_grad():
        phi = made(texts.ids, texts.mask)
        assert torch.allclose(made(ids, mask), phi, atol=1e-5)
        assert torch.allclose(made.encode(TextBatch(ids, mask)), phi, atol=1e-5)
        for row, length in enumerate(lengths):
            width = max(length, 1)
            alone = made(texts.ids[row : row + 1, :width], texts.mask[row : row + 1, :width])
            assert torch.allclose(alone[0], phi[row], atol=1e-5)


def test_a_text_without_tokens_has_only_the_block_of_zero():
    made = encoder().eval()
    phi = made.encode(batch([0, 2]))
    assert torch.equal(phi[0], torch.relu(made.residual.bias))
    fresh = InceptionEncoder(40, 6, WIDTHS, 5, 0.0, 0.0)
    assert not fresh.encode(batch([0])).any()


def test_gradients_reach_every_part_and_among_the_words_only_the_batch_s():
    made, texts = encoder(), batch([3, 0, 5, 2])
    made.encode(texts).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.to_dense()
        assert torch.isfinite(gradient).all(), name
        assert gradient.any(), name
    words = made.words.weight.grad
    assert words.is_sparse
    touched = set(words.coalesce().indices()[0].tolist())
    assert touched == set(texts.ids[texts.mask > 0].tolist())
    assert 0 not in touched  # the padding
    served = encoder()
    served(texts.ids, texts.mask).square().sum().backward()
    assert torch.allclose(words.to_dense(), served.words.weight.grad.to_dense(), rtol=1e-4, atol=1e-4)


def test_a_batch_of_empty_texts_has_finite_gradients():
    made = encoder()
    made.encode(batch([0, 0])).square().sum().backward()
    assert all(torch.isfinite(p.grad.to_dense()).all() for p in made.parameters() if p.grad is not None)


def test_word_dropout_is_for_training_only():
    made, texts = encoder(word_dropout=0.5), batch([5] * 50)
    assert torch.equal(made.eval().encode(texts), made.encode(texts))
    made.train()
    torch.manual_seed(0)
    first = made.encode(texts)
    assert not torch.equal(first, made.encode(texts))
    torch.manual_seed(0)
    assert torch.equal(first, made.encode(texts))
    assert torch.isfinite(first).all()


def test_training_begins_at_the_bag():
    fresh, texts = InceptionEncoder(40, 6, WIDTHS, 5, 0.0, 0.0), batch([3, 0, 5])
    bag = BagEncoder(40, 6, 0.0, 0.0)
    bag.words.load_state_dict(fresh.words.state_dict())
    assert torch.allclose(fresh.encode(texts), bag.encode(texts), atol=1e-6)


def test_word_order_matters():
    made = encoder().eval()
    ids, mask = torch.tensor([[4, 9, 13], [13, 9, 4]]), torch.ones(2, 3, dtype=torch.int64)
    phi = made(ids, mask)
    assert not torch.allclose(phi[0], phi[1], atol=1e-2)
