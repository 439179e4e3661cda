from __future__ import annotations

import math

import numpy as np
import pytest

from bidmatch.base.errors import ConfigError
from trainer.classifiers.build import make_codes
from trainer.classifiers.codes import (
    check_lengths,
    choose_lengths,
    cluster_codes,
    flat_codes,
    group_lengths,
    id_codes,
    mixed_radix,
)
from trainer.config import CascadeConfig, ProductConfig, SampledConfig, TableConfig


def unit_vectors(n: int, d: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("labels", [1, 2, 3, 7, 1000, 131_073, 10**6, 450 * 10**6])
def test_chosen_lengths_hold_all_labels_with_few_rows(labels, heads):
    lengths = choose_lengths(labels, heads)
    assert len(lengths) == heads
    assert math.prod(lengths) >= labels
    # Within a factor of two of H·L^(1/H), the least there can be.
    assert sum(lengths) <= 2 * heads * labels ** (1 / heads) + 1


@pytest.mark.parametrize("lengths", [(7,), (3, 5), (2, 3, 4), (1, 6, 1)])
def test_mixed_radix_and_back(lengths):
    numbers = np.arange(math.prod(lengths))
    codes = mixed_radix(numbers, lengths)
    assert np.array_equal(codes, np.array(list(np.ndindex(*lengths))))
    assert np.array_equal(flat_codes(codes, lengths), numbers)


@pytest.mark.parametrize("lengths", [(30, 40), (64, 20), (1, 1000), (8, 12, 11), (10, 10, 10), (4, 4, 4, 16)])
def test_clustered_codes_are_distinct_balanced_and_within_the_lengths(lengths):
    labels = 1000
    codes = cluster_codes(unit_vectors(labels, 12, 0), lengths, np.random.default_rng(0))
    assert codes.shape == (labels, len(lengths))
    assert (codes >= 0).all()
    assert (codes < np.array(lengths)).all()
    assert len(np.unique(flat_codes(codes, lengths))) == labels
    for head in range(1, len(lengths)):
        _, parent, sizes = np.unique(codes[:, :head], axis=0, return_inverse=True, return_counts=True)
        _, children = np.unique(codes[:, : head + 1], axis=0, return_counts=True)
        _, first = np.unique(codes[:, : head + 1], axis=0, return_index=True)
        for group in range(len(sizes)):
            own = children[parent.ravel()[first] == group]
            assert own.sum() == sizes[group]
            assert own.max() - own.min() <= 1


@pytest.mark.parametrize("labels", [1, 2, 3, 5, 17])
def test_few_labels_have_codes_too(labels):
    lengths = choose_lengths(labels, 2)
    codes = cluster_codes(unit_vectors(labels, 4, 1), lengths, np.random.default_rng(0))
    assert len(np.unique(flat_codes(codes, lengths))) == labels
    assert (codes < np.array(lengths)).all()


def test_identical_labels_get_distinct_codes():
    same = np.tile(unit_vectors(1, 8, 0), (100, 1))
    codes = cluster_codes(same, (10, 10), np.random.default_rng(0))
    assert len(np.unique(flat_codes(codes, (10, 10)))) == 100


def test_similar_labels_share_a_group():
    rng = np.random.default_rng(0)
    topic = rng.permutation(np.repeat(np.arange(16), 32))
    x = unit_vectors(16, 32, 1)[topic] + 0.02 * rng.standard_normal((512, 32)).astype(np.float32)
    codes = cluster_codes(x / np.linalg.norm(x, axis=1, keepdims=True), (16, 32), np.random.default_rng(0))
    pure = [np.bincount(topic[codes[:, 0] == group]).max() / 32 for group in range(16)]
    assert np.mean(pure) > 0.9


def test_codes_depend_on_the_seed_alone():
    x = unit_vectors(300, 8, 0)
    one, same, other = (cluster_codes(x, (16, 19), np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_lengths_that_cannot_hold_the_labels_are_refused():
    with pytest.raises(ConfigError, match=r"12 codes for 13 labels[\s\S]*for example"):
        check_lengths((3, 4), 13, 2)
    with pytest.raises(ConfigError, match="3 numbers for 2 heads"):
        check_lengths((3, 4, 5), 13, 2)
    with pytest.raises(ConfigError, match="at least 1"):
        check_lengths((0, 40), 13, 2)
    with pytest.raises(ConfigError, match="2\\^62"):
        check_lengths((2**40, 2**40), 13, 2)
    with pytest.raises(ConfigError, match="more than the 13 labels"):
        group_lengths(14, 13)


def test_groups_given_or_chosen_hold_all_labels():
    assert group_lengths(7, 100) == (7, 15)
    groups, members = group_lengths(0, 10_000)
    assert groups * members >= 10_000
    assert 50 <= groups <= 200


def test_codes_as_configured():
    rng = np.random.default_rng(0)
    assert make_codes(TableConfig(), None, 10, rng) is None
    by_id = make_codes(ProductConfig(lengths=(4, 3), codes="ids"), None, 11, rng)
    assert by_id is not None
    assert np.array_equal(by_id.numpy(), id_codes(11, (4, 3)))
    for config in (ProductConfig(), CascadeConfig(), SampledConfig()):
        codes = make_codes(config, unit_vectors(50, 4, 0), 50, rng)
        assert codes is not None
        assert codes.shape == (50, 2)
        with pytest.raises(ConfigError, match="no label embeddings"):
            make_codes(config, None, 50, rng)
