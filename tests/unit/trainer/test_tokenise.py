from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from trainer.tokenise import TokenisedTexts, ragged_positions, tokenise_all

TEXTS = ["red shoes", "", "garden hose 10 ft", "shoes", "unknown words only"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    words = ["[UNK]", "red", "shoes", "garden", "hose", "10", "ft"]
    made = Tokenizer(WordLevel({word: row for row, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return made


def padded(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    tokens = tokenise_all(tokenizer, pa.array(texts, pa.large_string()), "texts")
    return tokens.pad(np.arange(len(texts)))


def test_a_batch_is_padded_to_its_longest_text(tokenizer):
    ids, mask = padded(tokenizer, TEXTS)
    assert ids.dtype == mask.dtype == np.int64
    assert ids.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 6], [2, 0, 0, 0], [0, 0, 0, 0]]
    assert mask.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_a_batch_is_at_least_one_token_wide(tokenizer, texts):
    ids, mask = padded(tokenizer, texts)
    assert ids.shape == mask.shape == (len(texts), 1)
    assert not mask.any()


def test_a_corpus_in_blocks_equals_its_texts_one_by_one(tokenizer, monkeypatch):
    monkeypatch.setattr("trainer.tokenise._BLOCK", 2)
    tokens = tokenise_all(tokenizer, pa.array(TEXTS), "texts")
    assert len(tokens) == 5
    assert tokens.lengths.tolist() == [2, 0, 4, 1, 3]
    for row, text in enumerate(TEXTS):
        ids, mask = tokens.pad(np.array([row]))
        alone, alone_mask = padded(tokenizer, [text])
        assert np.array_equal(ids, alone)
        assert np.array_equal(mask, alone_mask)


def test_an_empty_corpus(tokenizer):
    tokens = tokenise_all(tokenizer, pa.array([], type=pa.large_string()), "texts")
    assert len(tokens) == 0
    assert len(tokens.lengths) == 0


def test_rows_may_be_taken_in_any_order_and_twice():
    tokens = TokenisedTexts(np.arange(10, dtype=np.int32), np.array([0, 3, 3, 10]))
    ids, mask = tokens.pad(np.array([2, 0, 1, 0]))
    assert ids[mask > 0].tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 0, 1, 2]
    assert mask.sum(1).tolist() == [7, 3, 0, 3]


def test_ragged_positions_against_slices():
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, 40))])
    rows = rng.integers(0, 40, 25)
    flat, mask = ragged_positions(offsets, rows)
    assert flat.tolist() == [at for row in rows for at in range(offsets[row], offsets[row + 1])]
    assert mask.sum(1).tolist() == [offsets[row + 1] - offsets[row] for row in rows]
