from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.classifiers import decode
from trainer.classifiers.codes import choose_lengths, id_codes, mixed_radix
from trainer.classifiers.decode import CodeBook, cascade_top_k, product_top_k


def brute_force(scores: list[np.ndarray], codes: np.ndarray, row: int, k: int) -> tuple[list, list]:
    """Every label scored by itself, sorted by score and then by label."""
    scored = []
    for label, code in enumerate(codes):
        total = scores[0].dtype.type(0)
        for head, local in enumerate(code):
            total = total + scores[head][row, local]
        scored.append((-total, label))
    best = sorted(scored)[:k]
    missing = k - len(best)
    return [b[1] for b in best] + [-1] * missing, [-b[0] for b in best] + [-np.inf] * missing


def random_scores(kind: str, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "ties":
        return rng.integers(0, 3, (n, length)).astype(np.float32)
    if kind == "constant":
        return np.ones((n, length), dtype=np.float32)
    return rng.standard_normal((n, length)).astype(np.float32 if kind == "float32" else np.float64)


@pytest.mark.parametrize("kind", ["float32", "float64", "ties", "constant"])
def test_best_labels_equal_brute_force_in_a_thousand_cases(kind):
    """250 cases of each kind: with invalid codes, equal scores, and more labels wanted than there are."""
    rng = np.random.default_rng(["float32", "float64", "ties", "constant"].index(kind))
    beyond = 0
    for _ in range(250):
        lengths = tuple(int(length) for length in rng.integers(1, 10, rng.integers(1, 5)))
        product = math.prod(lengths)
        labels = int(rng.integers(1, min(product, 400) + 1))
        codes = mixed_radix(rng.choice(product, labels, replace=False), lengths)
        scores = [random_scores(kind, 2, length, rng) for length in lengths]
        k = int(rng.integers(1, 13))
        beyond += k > labels
        found, values = product_top_k(scores, CodeBook.of(codes, lengths), k)
        for row in range(2):
            expected, expected_values = brute_force(scores, codes, row, k)
            assert found[row].tolist() == expected
            assert values[row].tolist() == expected_values
    assert beyond > 10


@pytest.mark.parametrize("heads", [2, 3])
def test_best_labels_of_many_come_from_few_codes(heads, monkeypatch):
    """At 10^5 labels most are never scored: a block that cannot hold one query's scores of all is enough."""
    labels = 100_000
    lengths = choose_lengths(labels, heads)
    rng = np.random.default_rng(0)
    order = rng.permutation(labels)
    codes = id_codes(labels, lengths)[order]
    scores = [rng.standard_normal((20, length)) for length in lengths]
    looked_up: list[int] = []
    lookup = CodeBook.lookup

    def counting(book: CodeBook, flat: np.ndarray) -> np.ndarray:
        looked_up.append(flat.size)
        return lookup(book, flat)

    monkeypatch.setattr(decode.CodeBook, "lookup", counting)
    found, _ = product_top_k(scores, CodeBook.of(codes, lengths), 10)
    total = sum(head[:, codes[:, h]] for h, head in enumerate(scores))
    assert np.array_equal(found, np.argsort(-total, axis=1, kind="stable")[:, :10])
    assert 0 < sum(looked_up) < 20 * labels / 20


def test_codes_that_are_no_labels_never_come_up():
    """The best code of every head together is no label; nor are most."""
    lengths = (50, 50)
    rng = np.random.default_rng(0)
    codes = mixed_radix(rng.choice(2500, 100, replace=False), lengths)
    scores = [rng.standard_normal((200, 50)) for _ in lengths]
    found, values = product_top_k(scores, CodeBook.of(codes, lengths), 10)
    assert ((found >= 0) & (found < 100)).all()
    assert np.array_equal(
        values,
        np.take_along_axis(scores[0], codes[found, 0], 1) + np.take_along_axis(scores[1], codes[found, 1], 1),
    )
    assert (np.diff(values, axis=1) <= 0).all()


def test_a_code_looks_up_its_label():
    codes = np.array([[1, 1], [0, 0], [1, 0]])
    book = CodeBook.of(codes, (2, 2))
    assert book.lookup(np.array([[0, 1], [2, 3]])).tolist() == [[1, -1], [2, 0]]


def test_the_cascade_finds_the_best_members_of_the_groups_it_looks_into():
    rng = np.random.default_rng(0)
    members = torch.tensor([[0, 1, 2], [3, 4, -1], [5, 6, 7], [8, -1, -1]])
    psi = torch.from_numpy(rng.standard_normal((9, 4)))
    queries = torch.from_numpy(rng.standard_normal((40, 4)))
    groups = torch.stack([torch.from_numpy(rng.permutation(4)[:2]) for _ in range(40)])
    found, values = cascade_top_k(queries, groups, lambda labels: psi[labels], members, 4)
    for row in range(40):
        inside = [int(label) for label in members[groups[row]].flatten() if label >= 0]
        scores = {label: float(queries[row] @ psi[label]) for label in inside}
        best = sorted(inside, key=lambda label: -scores[label])[:4]
        padding = [-1] * (4 - len(best))
        assert found[row].tolist() == best + padding
        assert values[row, : len(best)].tolist() == pytest.approx([scores[label] for label in best])
        assert torch.isneginf(values[row, len(best) :]).all()


def test_more_labels_wanted_than_the_groups_have_places():
    members = torch.tensor([[0, 1], [2, -1]])
    psi = torch.eye(3)
    found, _ = cascade_top_k(psi[:1], torch.tensor([[1]]), lambda labels: psi[labels], members, 5)
    assert found.tolist() == [[2, -1, -1, -1, -1]]
