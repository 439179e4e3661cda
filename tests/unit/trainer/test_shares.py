"""How a batch's texts are dealt out to processes, to chunks, and to calls of the encoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.distributed import Workers
from trainer.vectors import length_groups, shares_of

lengths = st.lists(st.integers(0, 40), max_size=60).map(lambda found: np.array(found, dtype=np.int64))


@given(lengths, st.integers(0, 20), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_every_text_is_encoded_once_in_chunks_that_are_no_larger_than_asked(texts, chunk, processes):
    shares = shares_of(texts, chunk, processes)
    assert len(shares) == processes
    chunks = [part for share in shares for part in share]
    assert sorted(np.concatenate([[], *chunks])) == list(range(len(texts)))
    assert all(len(part) for part in chunks)
    assert all(len(part) <= chunk for part in chunks if chunk)
    assert all((np.diff(texts[part]) >= 0).all() for part in chunks)


@given(lengths, st.integers(1, 20), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_chunks_below_a_share_do_not_depend_on_the_processes(texts, chunk, processes):
    if chunk >= -(-len(texts) // processes):
        return
    alone = {tuple(part) for part in shares_of(texts, chunk, 1)[0]}
    assert {tuple(part) for share in shares_of(texts, chunk, processes) for part in share} == alone


def test_processes_get_as_many_texts_and_about_as_many_tokens():
    texts = np.random.default_rng(0).gamma(4, 3, 1000).astype(np.int64)
    shares = [np.concatenate(share) for share in shares_of(texts, 0, 4)]
    assert {len(share) for share in shares} == {250}
    tokens = [texts[share].sum() for share in shares]
    assert max(tokens) / min(tokens) < 1.02


@given(lengths, st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_groups_are_all_texts_in_order_and_pad_no_more_than_one_group(texts, worth):
    texts = np.sort(texts)
    groups = length_groups(texts, worth)
    assert 1 <= len(groups) <= 4
    assert [row for group in groups for row in range(len(texts))[group]] == list(range(len(texts)))
    if len(texts):
        padded = sum((group.stop - group.start) * texts[group].max() for group in groups)
        assert padded <= len(texts) * texts.max() - worth * (len(groups) - 1)


def test_the_cut_is_where_it_saves_most():
    texts = np.array([3] * 50 + [4] * 10 + [30] * 4)
    assert length_groups(texts, 100) == [slice(0, 60), slice(60, 64)]
    assert length_groups(texts, 40) == [slice(0, 50), slice(50, 60), slice(60, 64)]
    assert length_groups(texts, 10_000) == [slice(0, 64)]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_of_the_processes_are_all_items_and_differ_by_one_at_most(n, count):
    shares = [Workers(rank=rank, count=count).share(n) for rank in range(count)]
    assert [item for share in shares for item in range(n)[share]] == list(range(n))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
