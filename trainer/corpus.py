"""Texts in the form an encoder trains on: token ids, and with them what frozen parts make of them, cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer

from bidmatch.base.console import progress
from bidmatch.base.text import key
from trainer.distributed import Workers
from trainer.encoders.base import Encoder, Frozen, TextBatch
from trainer.tokenise import TokenisedTexts, ragged_positions, tokenise_all

_TEXTS_A_BATCH = 128


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
        ids, mask = self.tokens.pad(rows)
        flat, filled = ragged_positions(self.tokens.offsets, rows)
        states = np.zeros((*filled.shape, self.hidden.shape[1]), dtype=np.float32)
        states[filled] = self.hidden[flat]
        return TextBatch(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(mask).to(device),
            hidden=torch.from_numpy(states).to(device),
        )


@dataclass(frozen=True)
class PooledSource:
    """Batches of token ids with the vectors of a wholly frozen transformer, read from disk.

    Attributes:
        tokens: the texts.
        pooled: float16 memory map (N, h), a row a text.
    """

    tokens: TokenisedTexts
    pooled: np.memmap

    def batch(self, rows: np.ndarray, device: torch.device) -> TextBatch:
        """The given texts (int64 rows), padded, on the device."""
        ids, mask = self.tokens.pad(rows)
        return TextBatch(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(mask).to(device),
            pooled=torch.from_numpy(self.pooled[rows].astype(np.float32)).to(device),
        )


def keys_of(phrases: pa.Table) -> pa.Array:
    """The keys of the phrases' texts, Arrow string array (L,): what the encoder reads."""
    return pa.array([key(text) for text in phrases["text"].to_pylist()], type=pa.large_string())


def token_source(tokenizer: Tokenizer, texts: pa.Array, label: str) -> TokenSource:
    """Tokenise a corpus of keys."""
    return TokenSource(tokenise_all(tokenizer, texts, label))


def shared_source(make: Callable[[], TokenSource], folder: Path, workers: Workers) -> TokenSource:
    """A corpus that the first of several processes makes and all map into memory, once a machine.

    Args:
        make: what makes it.
        folder: for its arrays, where there are several processes.
        workers: the processes.
    """
    if workers.count == 1:
        return make()

    def save() -> None:
        tokens = make().tokens
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "ids.npy", tokens.ids)
        np.save(folder / "offsets.npy", tokens.offsets)

    workers.first(save)
    ids, offsets = (
        # An empty array cannot be mapped.
        np.asarray(np.load(folder / name, mmap_mode="r" if (folder / name).stat().st_size > 128 else None))
        for name in ("ids.npy", "offsets.npy")
    )
    return TokenSource(TokenisedTexts(ids, offsets))


def cached_source(
    encoder: Encoder,
    source: TokenSource,
    file: Path,
    device: torch.device,
    label: str,
    workers: Workers | None = None,
) -> TextSource:
    """The corpus with what the encoder's frozen part makes of it, computed once; as it is without one.

    Kept in half precision in `file`, which is made anew each time: it is derived data. Texts are taken in
    order of length, so that little is spent on padding.

    Args:
        encoder: on the device.
        source: the texts.
        file: written, and its folder made, where something is frozen.
        device: of the encoder.
        label: what progress is reported under.
        workers: processes of one machine share the work; of several, the first process does it, since not
            every shared file system puts together what different machines write into one file.
    """
    workers = workers or Workers()
    sharing = workers.count if workers.local_count == workers.count else 1
    tokens = source.tokens
    if encoder.frozen is Frozen.NOTHING or not len(tokens):
        return source
    rows_kept = len(tokens.ids) if encoder.frozen is Frozen.LAYERS else len(tokens)
    order = np.argsort(tokens.lengths, kind="stable")

    def states_of(rows: np.ndarray) -> np.ndarray:
        batch = source.batch(rows, device)
        states: np.ndarray = encoder.frozen_part(batch.ids, batch.mask).cpu().numpy()
        return states

    with torch.no_grad(), progress(f"caching the frozen part of {label}", len(tokens), "texts") as step:
        shape = (max(rows_kept, 1), states_of(order[:1]).shape[-1])

        def make_file() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            np.memmap(file, dtype=np.float16, mode="w+", shape=shape)

        workers.first(make_file)
        kept = np.memmap(file, dtype=np.float16, mode="r+", shape=shape)
        for number, start in enumerate(range(0, len(order), _TEXTS_A_BATCH)):
            rows = order[start : start + _TEXTS_A_BATCH]
            if number % sharing == workers.rank:
                states = states_of(rows)
                if encoder.frozen is Frozen.LAYERS:
                    flat, filled = ragged_positions(tokens.offsets, rows)
                    kept[flat] = states[filled]
                else:
                    kept[rows] = states
            step.advance(len(rows))
    kept.flush()
    workers.wait()
    written = np.memmap(file, dtype=np.float16, mode="r", shape=kept.shape)
    if encoder.frozen is Frozen.LAYERS:
        return ActivationSource(tokens, written)
    return PooledSource(tokens, written)
