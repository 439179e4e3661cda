"""Texts in the form an encoder trains on: token ids, or cached activations above frozen layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer

from bidmatch.base.console import progress
from bidmatch.base.text import key
from trainer.encoders.base import TextBatch
from trainer.encoders.transformer import TransformerEncoder
from trainer.tokenise import TokenisedTexts, ragged_positions, tokenise_all


class TextSource(Protocol):
    """A corpus from which batches are taken by row."""

    @property
    def tokens(self) -> TokenisedTexts:
        """Token ids of all texts."""
        ...

    def batch(self, rows: np.ndarray, device: torch.device) -> TextBatch:
        """The given texts (int64 rows), padded, on the device."""
        ...


@dataclass(frozen=True)
class TokenSource:
    """Batches of token ids."""

    tokens: TokenisedTexts

    def batch(self, rows: np.ndarray, device: torch.device) -> TextBatch:
        """The given texts (int64 rows), padded, on the device."""
        ids, mask = self.tokens.pad(rows)
        return TextBatch(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device))


@dataclass(frozen=True)
class ActivationSource:
    """Batches of activations above the frozen layers, read from disk.

    Attributes:
        tokens: the texts.
        hidden: float16 memory map (total tokens, h), in the order of `tokens.ids`.
    """

    tokens: TokenisedTexts
    hidden: np.memmap

    def batch(self, rows: np.ndarray, device: torch.device) -> TextBatch:
        """The given texts (int64 rows), padded, on the device."""
        flat, filled = ragged_positions(self.tokens.offsets, rows)
        states = np.zeros((*filled.shape, self.hidden.shape[1]), dtype=np.float32)
        states[filled] = self.hidden[flat]
        mask = torch.from_numpy(filled.astype(np.int64)).to(device)
        return TextBatch(torch.zeros_like(mask), mask, torch.from_numpy(states).to(device))


def keys_of(phrases: pa.Table) -> pa.Array:
    """The keys of the phrases' texts, Arrow string array (L,): what the encoder reads."""
    return pa.array([key(text) for text in phrases["text"].to_pylist()], type=pa.large_string())


def token_source(tokenizer: Tokenizer, texts: pa.Array, label: str) -> TokenSource:
    """Tokenise a corpus of keys."""
    return TokenSource(tokenise_all(tokenizer, texts, label))


def activation_source(
    encoder: TransformerEncoder, source: TokenSource, file: Path, device: torch.device, label: str
) -> ActivationSource:
    """Run the frozen layers once over a corpus and keep what comes out, in half precision, in `file`.

    Texts are taken in order of length, so that little is spent on padding. The file is made anew each time:
    it is derived data.
    """
    tokens = source.tokens
    file.parent.mkdir(parents=True, exist_ok=True)
    hidden = np.memmap(file, dtype=np.float16, mode="w+", shape=(max(len(tokens.ids), 1), encoder.width))
    order = np.argsort(tokens.lengths, kind="stable")
    with torch.no_grad(), progress(f"caching frozen layers of {label}", len(tokens), "texts") as step:
        for start in range(0, len(order), 128):
            rows = order[start : start + 128]
            batch = source.batch(rows, device)
            states = encoder.lower(batch.ids, batch.mask).cpu().numpy()
            flat, filled = ragged_positions(tokens.offsets, rows)
            hidden[flat] = states[filled].astype(np.float16)
            step.advance(len(rows))
    hidden.flush()
    return ActivationSource(tokens, np.memmap(file, dtype=np.float16, mode="r", shape=hidden.shape))
