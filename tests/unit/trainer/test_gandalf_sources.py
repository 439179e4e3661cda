"""The training set with label texts in it: texts of two corpora as one, and their targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import GandalfConfig
from trainer.corpus import ActivationSource, PooledSource, TextSource, TokenSource
from trainer.encoders.bag import BagEncoder
from trainer.gandalf.augment import augment, with_label_texts
from trainer.gandalf.source import JoinedSource, SelectedSource
from trainer.gandalf.targets import gandalf_pairs
from trainer.tokenise import TokenisedTexts

CPU = torch.device("cpu")
WIDTH = 3


def texts(lengths: list[int], first_id: int) -> TokenisedTexts:
    """Texts of these lengths; ids count up from `first_id`, so that every token is told apart."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return TokenisedTexts(np.arange(first_id, first_id + offsets[-1], dtype=np.int32), offsets)


def activations(tokens: TokenisedTexts, tmp_path, name: str) -> ActivationSource:
    hidden = np.memmap(tmp_path / name, dtype=np.float16, mode="w+", shape=(max(len(tokens.ids), 1), WIDTH))
    hidden[: len(tokens.ids)] = tokens.ids[:, None] + np.array([0.0, 0.25, 0.5])
    return ActivationSource(tokens, hidden)


def tokens_at(source: TextSource, row: int) -> list[int]:
    tokens = source.tokens
    return tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]].tolist()


LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.data())
def test_each_row_of_a_joined_batch_is_its_corpus_text(first_lengths, second_lengths, data):
    first, second = TokenSource(texts(first_lengths, 1)), TokenSource(texts(second_lengths, 1001))
    labels = np.array(
        data.draw(st.lists(st.integers(0, len(second_lengths) - 1), max_size=5)), dtype=np.int64
    )
    joined = JoinedSource(first, second, labels)
    expected = [tokens_at(first, row) for row in range(len(first_lengths))]
    expected += [tokens_at(second, label) for label in labels]
    assert [tokens_at(joined, row) for row in range(len(joined.tokens))] == expected
    rows = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=12)), dtype=np.int64)
    batch = joined.batch(rows, CPU)
    wanted = TokenSource(joined.tokens).batch(rows, CPU)
    assert torch.equal(batch.ids, wanted.ids)
    assert torch.equal(batch.mask, wanted.mask)
    assert batch.hidden is None


@pytest.mark.parametrize("rows", [[4, 0, 3, 1, 2], [0, 1], [3, 2, 4], [], [3, 3, 0]])
def test_cached_activations_come_in_order_and_padded_to_the_longer(tmp_path, rows):
    first = activations(texts([1, 2], 1), tmp_path, "queries")
    second = activations(texts([5, 0, 3], 101), tmp_path, "labels")
    joined = JoinedSource(first, second, np.array([2, 0, 1]))
    whole = activations(joined.tokens, tmp_path, "whole")
    batch, wanted = joined.batch(np.array(rows, dtype=np.int64), CPU), whole.batch(np.array(rows, int), CPU)
    assert torch.equal(batch.mask, wanted.mask)
    assert torch.equal(batch.ids, wanted.ids)
    assert batch.hidden is not None
    assert torch.equal(batch.hidden, wanted.hidden)


def test_vectors_of_a_wholly_frozen_encoder_come_in_order():
    pooled: Any = np.arange(20, dtype=np.float16).reshape(5, 4)
    first, second = PooledSource(texts([1, 2], 1), pooled[:2]), PooledSource(texts([5, 0, 3], 9), pooled[2:])
    batch = JoinedSource(first, second, np.array([2, 0])).batch(np.array([3, 0, 2, 1]), CPU)
    assert batch.pooled is not None
    np.testing.assert_array_equal(batch.pooled.numpy(), pooled[[2, 0, 4, 1]])
    assert batch.mask.sum(1).tolist() == [5, 1, 3, 2]


def test_activations_beside_bare_tokens_are_refused(tmp_path):
    first = activations(texts([1, 2], 1), tmp_path, "queries")
    joined = JoinedSource(first, TokenSource(texts([3], 101)), np.array([0]))
    with pytest.raises(ValueError, match="cached activations"):
        joined.batch(np.array([0, 2]), CPU)


def test_selected_texts_are_a_corpus_of_their_own():
    source = TokenSource(texts([2, 0, 3], 10))
    selected = SelectedSource(source, np.array([2, 0]))
    assert [tokens_at(selected, row) for row in range(2)] == [[12, 13, 14], [10, 11]]
    assert torch.equal(selected.batch(np.array([1, 0]), CPU).ids, torch.tensor([[10, 11, 0], [12, 13, 14]]))


def test_an_encoder_gives_a_joined_batch_the_vectors_of_its_parts():
    torch.manual_seed(0)
    encoder = BagEncoder(60, 8, 0.0, 0.0).eval()
    first, second = TokenSource(texts([2, 4], 1)), TokenSource(texts([3, 1], 31))
    joined = JoinedSource(first, second, np.array([1, 0]))
    found = encoder.encode(joined.batch(np.array([2, 1, 3, 0]), CPU))
    labels, queries = (encoder.encode(source.batch(np.arange(2), CPU)) for source in (second, first))
    torch.testing.assert_close(found, torch.stack([labels[1], queries[1], labels[0], queries[0]]))


CLICKS = sp.csr_matrix(
    (np.array([2.5, 0.5, 9.0, 0.0, 4.0], np.float32), np.array([1, 0, 1, 2, 1]), np.array([0, 2, 4, 4, 5])),
    shape=(4, 3),
)


def test_real_rows_have_targets_of_one_and_come_before_the_label_rows():
    pairs = gandalf_pairs(CLICKS, GandalfConfig(), np.random.default_rng(0))
    joined = augment(CLICKS, pairs)
    assert joined.dtype == np.float32
    expected = [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0], [1, 1, 0], [1 / 3, 1, 0], [0, 0, 1]]
    np.testing.assert_allclose(joined.toarray(), expected, rtol=1e-6)
    np.testing.assert_array_equal(CLICKS.data, [2.5, 0.5, 9.0, 0.0, 4.0])


def test_a_pair_clicked_twice_has_a_target_of_one():
    clicks = sp.csr_matrix((np.ones(2, np.float32), np.array([0, 0]), np.array([0, 2])), shape=(1, 1))
    pairs = gandalf_pairs(clicks, GandalfConfig(), np.random.default_rng(0))
    np.testing.assert_array_equal(augment(clicks, pairs).toarray(), [[1], [1]])


def test_texts_and_targets_of_a_training_set_match_row_by_row():
    queries, labels = TokenSource(texts([2, 1, 3, 1], 1)), TokenSource(texts([1, 2, 2], 101))
    config = GandalfConfig(share=0.7, sampling="tail", graph="self")
    source, targets = with_label_texts(queries, labels, CLICKS, config, np.random.default_rng(0))
    assert targets.shape == (6, 3)
    assert len(source.tokens) == 6
    for row in (4, 5):
        (label,) = targets[row].indices
        assert tokens_at(source, row) == tokens_at(labels, label)


def test_alone_leaves_the_logs_queries_out():
    queries, labels = TokenSource(texts([2, 1, 3, 1], 1)), TokenSource(texts([1, 2, 2], 101))
    config = GandalfConfig(alone=True)
    source, targets = with_label_texts(queries, labels, CLICKS, config, np.random.default_rng(0))
    expected = gandalf_pairs(CLICKS, config, np.random.default_rng(0)).targets
    np.testing.assert_array_equal(targets.toarray(), expected.toarray())
    assert [tokens_at(source, row) for row in range(3)] == [tokens_at(labels, row) for row in range(3)]
