"""Label vectors, and the check that ONNX computes what torch does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bidmatch.base.console import progress
from bidmatch.base.errors import BidmatchError
from export.bundle.encoder import TextEncoder
from export.bundle.format import Parity
from export.bundle.write import create_vectors
from export.onnx_graph import QueryVector
from export.source import ExportSource

LEAST_COSINE = 0.9999
_BLOCK = 8_192
_TORCH_BATCH = 64


def unit_rows(x: np.ndarray) -> np.ndarray:
    """N(x): each row at unit length; a zero row stays zero."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def write_label_vectors(folder: Path, source: ExportSource, encoder: TextEncoder) -> np.memmap:
    """Write [Φ_D(z) ⊕ N(Ψ)] of every phrase to `vectors.npy`, float32 (L, dim), by the block; returns it."""
    count, half = source.table.shape
    texts = source.phrases["text"]
    vectors = create_vectors(folder, count, 2 * half)
    with progress("encoding phrases", count, "phrases") as step:
        for start in range(0, count, _BLOCK):
            block = texts.slice(start, _BLOCK).to_pylist()
            rows = slice(start, start + len(block))
            vectors[rows, :half] = encoder.encode(block)[:, :half]
            vectors[rows, half:] = unit_rows(source.table[rows])
            step.advance(len(block))
    vectors.flush()
    return vectors


def torch_vectors(model: nn.Module, encoder: TextEncoder, texts: Sequence[str]) -> np.ndarray:
    """What torch gives for texts, float32 (n, dim), tokenised as the bundle does."""
    wrapped = QueryVector(model).eval()
    parts = []
    with torch.inference_mode():
        for start in range(0, len(texts), _TORCH_BATCH):
            ids, mask = encoder.tokenise(texts[start : start + _TORCH_BATCH])
            parts.append(wrapped(torch.from_numpy(ids), torch.from_numpy(mask)).numpy())
    return np.concatenate(parts)


def half_cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For each row, the lesser of the cosines of the first and of the second halves; two zeros count as 1.

    Args:
        a: (n, dim).
        b: (n, dim).

    Returns:
        float64 (n,).
    """
    half = a.shape[1] // 2
    cosines = []
    for part in (slice(0, half), slice(half, None)):
        x, y = a[:, part].astype(np.float64), b[:, part].astype(np.float64)
        lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        both_zero = ~x.any(axis=1) & ~y.any(axis=1)
        cosines.append(np.where(both_zero, 1.0, (x * y).sum(axis=1) / np.maximum(lengths, 1e-30)))
    return np.minimum(*cosines)


def check_parity(model: nn.Module, encoder: TextEncoder, texts: Sequence[str]) -> Parity:
    """Cosine of torch and ONNX on texts, one query a call in ONNX, as it is served.

    Raises:
        BidmatchError: it is below 0.9999 somewhere.
    """
    expected = torch_vectors(model, encoder, texts)
    with progress("comparing ONNX with torch", len(texts), "queries") as step:
        got = np.empty_like(expected)
        for i, text in enumerate(texts):
            got[i] = encoder.run(*encoder.tokenise([text]))[0]
            step.advance()
    cosines = half_cosines(expected, got)
    parity = Parity(
        queries=len(texts),
        min_cosine=round(min(float(cosines.min()), 1.0), 8),
        mean_cosine=round(min(float(cosines.mean()), 1.0), 8),
    )
    if not np.isfinite(got).all() or parity.min_cosine < LEAST_COSINE:
        worst = texts[int(np.argmin(cosines))]
        raise BidmatchError(
            f"the ONNX encoder differs from torch: cosine {parity.min_cosine} for {worst!r}",
            hint="Please report it with the versions of torch, onnx and onnxruntime.",
        )
    return parity
