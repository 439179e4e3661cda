"""Φ_D and Φ_C of a whole corpus, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bidmatch.base.console import progress
from trainer.corpus import TextSource
from trainer.model import DualHeadModel, HeadVectors

_TOKENS_A_BATCH = 16_384


@contextmanager
def evaluating(model: DualHeadModel) -> Iterator[None]:
    """Evaluation mode and no gradients within; the mode is put back after."""
    before = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(before)


def embed(
    model: DualHeadModel, source: TextSource, device: torch.device, label: str, *, wide: bool = False
) -> list[HeadVectors]:
    """Φ_D (unit length) and Φ_C (not normalised) of all texts, float32 (N, d) and (N, c), on the device.

    Batches hold texts of like length and a bounded number of tokens.

    Returns:
        vectors of the narrow pair of heads; with `wide`, of each pair there is.
    """
    lengths = source.tokens.lengths
    order = np.argsort(lengths, kind="stable")
    widths = model.widths if wide else model.widths[:1]
    found = [
        HeadVectors(*(torch.empty(len(lengths), width, device=device) for width in pair)) for pair in widths
    ]
    with evaluating(model), progress(label, len(lengths), "texts") as step:
        start = 0
        while start < len(order):
            # Sorted by length, so the block's last text is about as long as its first.
            size = max(1, _TOKENS_A_BATCH // max(1, int(lengths[order[start]])))
            rows = order[start : start + size]
            at = torch.from_numpy(rows).to(device)
            for into, pair in zip(found, model.encode(source.batch(rows, device)), strict=False):
                for part, vectors in zip(into, pair, strict=True):
                    part[at] = vectors.float()
            start += len(rows)
            step.advance(len(rows))
    return found
