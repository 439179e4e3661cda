"""Texts of several corpora as one corpus."""

from __future__ import annotations

import numpy as np
import torch

from trainer.corpus import TextSource
from trainer.encoders.base import TextBatch
from trainer.tokenise import TokenisedTexts


def select_texts(tokens: TokenisedTexts, rows: np.ndarray) -> TokenisedTexts:
    """Some of the texts, int64 `rows`, in their order."""
    lengths = tokens.lengths[rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Not by a padded matrix: of a whole corpus, it would be as wide as the longest text.
    flat = np.arange(offsets[-1]) + np.repeat(tokens.offsets[rows] - offsets[:-1], lengths)
    return TokenisedTexts(tokens.ids[flat], offsets)


def join_texts(first: TokenisedTexts, second: TokenisedTexts) -> TokenisedTexts:
    """The texts of both, one corpus behind the other."""
    offsets = np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]])
    return TokenisedTexts(np.concatenate([first.ids, second.ids]), offsets)


class SelectedSource:
    """Some texts of a corpus as a corpus.

    Args:
        source: the corpus.
        rows: int64 (M,), which of its texts; text i of this corpus is text rows[i] of that one.
    """

    def __init__(self, source: TextSource, rows: np.ndarray):
        self._source, self._rows = source, rows
        self._tokens = select_texts(source.tokens, rows)

    @property
    def tokens(self) -> TokenisedTexts:
        """Token ids of all texts."""
        return self._tokens

    def batch(self, rows: np.ndarray, device: torch.device) -> TextBatch:
        """The given texts (int64 rows), padded, on the device."""
        return self._source.batch(self._rows[rows], device)


class JoinedSource:
    """All texts of one corpus, then some of another's.

    Args:
        first: the corpus of rows 0 to N - 1.
        second: the corpus of the rows behind.
        rows: int64 (M,), which of `second`'s texts; row N + i is its text rows[i].
    """

    def __init__(self, first: TextSource, second: TextSource, rows: np.ndarray):
        self._first, self._second = first, SelectedSource(second, rows)
        self._boundary = len(first.tokens)
        self._tokens = join_texts(first.tokens, self._second.tokens)

    @property
    def tokens(self) -> TokenisedTexts:
        """Token ids of all texts."""
        return self._tokens

    def batch(self, rows: np.ndarray, device: torch.device) -> TextBatch:
        """The given texts (int64 rows), in this order, padded to the longest of both corpora's.

        Raises:
            ValueError: one corpus has cached activations and the other has none.
        """
        behind = rows >= self._boundary
        if not behind.any():
            return self._first.batch(rows, device)
        if behind.all():
            return self._second.batch(rows - self._boundary, device)
        first = self._first.batch(rows[~behind], device)
        second = self._second.batch(rows[behind] - self._boundary, device)
        cached = [(batch.hidden is not None, batch.pooled is not None) for batch in (first, second)]
        if cached[0] != cached[1]:
            raise ValueError("one corpus has cached activations and the other has none")
        order = np.empty(len(rows), dtype=np.int64)
        order[np.concatenate([np.flatnonzero(~behind), np.flatnonzero(behind)])] = np.arange(len(rows))
        places = torch.from_numpy(order).to(device)
        hidden = pooled = None
        if first.hidden is not None and second.hidden is not None:
            hidden = _padded(first.hidden, second.hidden)[places]
        if first.pooled is not None and second.pooled is not None:
            pooled = torch.cat([first.pooled, second.pooled])[places]
        return TextBatch(
            _padded(first.ids, second.ids)[places], _padded(first.mask, second.mask)[places], hidden, pooled
        )


def _padded(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Both (n, t, ...) under one another, with zeros up to the larger t."""
    width = max(first.shape[1], second.shape[1])
    joined = first.new_zeros((len(first) + len(second), width, *first.shape[2:]))
    joined[: len(first), : first.shape[1]] = first
    joined[len(first) :, : second.shape[1]] = second
    return joined
