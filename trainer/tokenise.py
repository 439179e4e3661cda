"""Texts to token ids: once for a whole corpus, kept ragged, padded only by the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from bidmatch.base.console import progress

_BLOCK = 20_000


@dataclass(frozen=True)
class TokenisedTexts:
    """Token ids of N texts, one after another.

    Attributes:
        ids: int32, all texts' ids joined.
        offsets: int64 (N + 1,); text i is `ids[offsets[i]:offsets[i + 1]]`.
    """

    ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens a text, int64 (N,)."""
        return np.diff(self.offsets)

    def pad(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask, int64 (n, t), of the given texts, padded to the longest (t >= 1)."""
        flat, mask = ragged_positions(self.offsets, rows)
        ids = np.zeros(mask.shape, dtype=np.int64)
        ids[mask] = self.ids[flat]
        return ids, mask.astype(np.int64)


def ragged_positions(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the items of ragged rows lie.

    Args:
        offsets: int64 (N + 1,), ends of the rows in the flat array.
        rows: int64 (n,), the rows wanted.

    Returns:
        flat int64 positions of all their items, row by row, and a bool mask (n, t) of a padded matrix
        (t >= 1) into which the items go in row-major order.
    """
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    width = max(int(lengths.max(initial=0)), 1)
    steps = np.arange(width)
    mask = steps < lengths[:, None]
    return (starts[:, None] + steps)[mask], mask


def tokenise_all(tokenizer: Tokenizer, texts: pa.Array, label: str) -> TokenisedTexts:
    """Token ids of a whole corpus of keys, with progress under `label`."""
    parts: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    with progress(f"tokenising {label}", len(texts), "texts") as step:
        for start in range(0, len(texts), _BLOCK):
            block = tokenizer.encode_batch_fast(texts[start : start + _BLOCK].to_pylist())
            parts.extend(np.asarray(encoding.ids, dtype=np.int32) for encoding in block)
            lengths.append(
                np.fromiter((len(encoding) for encoding in block), dtype=np.int64, count=len(block))
            )
            step.advance(len(block))
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    if lengths:
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
    ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    return TokenisedTexts(ids, offsets)
