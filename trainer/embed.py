"""Φ_D and Φ_C of a whole corpus, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bidmatch.base.console import progress
from trainer.corpus import TextSource
from trainer.model import DualHeadModel

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
    model: DualHeadModel, source: TextSource, device: torch.device, label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Φ_D (unit length) and Φ_C (not normalised) of all texts, float32 (N, d/2) each, on the device.

    Batches hold texts of like length and a bounded number of tokens.
    """
    lengths = source.tokens.lengths
    order = np.argsort(lengths, kind="stable")
    half = model.head_width
    phi_d = torch.empty(len(lengths), half, device=device)
    phi_c = torch.empty(len(lengths), half, device=device)
    with evaluating(model), progress(label, len(lengths), "texts") as step:
        start = 0
        while start < len(order):
            # Sorted by length, so the block's last text is about as long as its first.
            size = max(1, _TOKENS_A_BATCH // max(1, int(lengths[order[start]])))
            rows = order[start : start + size]
            d, c = model.encode(source.batch(rows, device))
            at = torch.from_numpy(rows).to(device)
            phi_d[at], phi_c[at] = d.float(), c.float()
            start += len(rows)
            step.advance(len(rows))
    return phi_d, phi_c
