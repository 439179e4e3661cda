"""Φ_D and Φ_C of a whole corpus, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bidmatch.base.console import progress
from trainer.corpus import TextSource
from trainer.distributed import Workers
from trainer.model import DualHeadModel, HeadVectors

# A GPU is kept waiting by small batches.
_TOKENS_A_BATCH = {"cpu": 16_384, "cuda": 65_536}


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


def length_blocks(lengths: np.ndarray, tokens: int = _TOKENS_A_BATCH["cpu"]) -> Iterator[np.ndarray]:
    """Rows of texts of like length, int64, in blocks of about this many tokens, the shortest texts first."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        # Sorted by length, so the block's last text is about as long as its first.
        size = max(1, tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + size]
        start += size


def embed(
    model: DualHeadModel,
    source: TextSource,
    device: torch.device,
    label: str,
    *,
    wide: bool = False,
    classifier: bool = True,
    bf16: bool = False,
    keep_on: torch.device | None = None,
    workers: Workers | None = None,
) -> list[HeadVectors]:
    """Φ_D (unit length) and Φ_C (not normalised) of all texts, float32 (N, d) and (N, c).

    Batches hold texts of like length and a bounded number of tokens. Several processes take turns at them,
    and each ends with all vectors.

    Args:
        model: on the device.
        source: the texts.
        device: of the model.
        label: what progress is reported under.
        wide: the vectors of each pair of heads there is, not of the narrow pair alone.
        classifier: make Φ_C, too; else c is 0.
        bf16: encode under bf16 autocast: good enough to find neighbours with, not for figures.
        keep_on: where the vectors end; by default on the model's device.
        workers: the processes that share the work.
    """
    workers = workers or Workers()
    lengths = source.tokens.lengths
    keep_on = keep_on or device
    widths = [(d, c if classifier else 0) for d, c in (model.widths if wide else model.widths[:1])]
    found = [
        HeadVectors(*(torch.zeros(len(lengths), width, device=keep_on) for width in pair)) for pair in widths
    ]
    with (
        evaluating(model),
        progress(label, len(lengths), "texts") as step,
        torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16),
    ):
        for number, rows in enumerate(length_blocks(lengths, _TOKENS_A_BATCH[device.type])):
            if number % workers.count == workers.rank:
                at = torch.from_numpy(rows).to(keep_on)
                made = model.encode(source.batch(rows, device), classifier=classifier)
                for into, pair in zip(found, made, strict=False):
                    for part, vectors in zip(into, pair, strict=True):
                        part[at] = vectors.float().to(keep_on)
            # Others' blocks, too: they take about as long.
            step.advance(len(rows))
    for pair in found:
        for part in pair:
            workers.merge(part)
    return found
