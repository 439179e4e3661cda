"""Label vectors, and the check that ONNX computes what torch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bidmatch.base.console import progress
from bidmatch.base.errors import BidmatchError
from export.bundle.encoder import QueryVectors, TextEncoder
from export.bundle.format import Parity
from export.bundle.read import WideVectors
from export.bundle.rescore import to_8_bits
from export.bundle.write import create_vectors, create_wide
from export.source import ExportSource
from trainer.model import DualHeadModel

LEAST_COSINE = 0.9999
_BLOCK = 8_192
_TORCH_BATCH = 64


@dataclass(frozen=True)
class LabelVectors:
    """The vectors [Φ_D(z) ⊕ N(Ψ)] of all phrases, as they are in the bundle's files.

    Attributes:
        narrow: float32 (L, dim): what is searched.
        wide: what re-scores; None where nothing does.
    """

    narrow: np.ndarray
    wide: WideVectors | None


def unit_rows(x: np.ndarray) -> np.ndarray:
    """N(x): each row at unit length; a zero row stays zero."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def write_label_vectors(folder: Path, source: ExportSource, encoder: TextEncoder) -> LabelVectors:
    """Write `vectors.npy` and, where the bundle re-scores, `wide.npy` and `wide_scales.npy`, by the block."""
    count, split = source.phrases.num_rows, source.widths[0][0]
    texts = source.phrases["text"]
    narrow = create_vectors(folder, count, source.dim)
    wide: tuple[np.memmap, np.memmap, int] | None = None
    if source.wide_table is not None:
        wide = (*create_wide(folder, count, source.wide_dim), source.widths[1][0])
    with progress("encoding phrases", count, "phrases") as step:
        for start in range(0, count, _BLOCK):
            block = texts.slice(start, _BLOCK).to_pylist()
            rows = slice(start, start + len(block))
            phi_d = _phi_d(source, encoder, block, rows)
            narrow[rows, :split] = phi_d[0]
            narrow[rows, split:] = unit_rows(source.table[rows])
            if wide is not None and source.wide_table is not None:
                values, scales, wide_split = wide
                psi = unit_rows(source.wide_table[rows])
                joined = np.concatenate([phi_d[1], psi], axis=1)
                values[rows], scales[rows] = to_8_bits(joined, wide_split)
            step.advance(len(block))
    narrow.flush()
    if wide is None:
        return LabelVectors(narrow, None)
    for array in wide[:2]:
        array.flush()
    return LabelVectors(narrow, WideVectors(np.asarray(wide[0]), np.asarray(wide[1]), wide[2]))


def _phi_d(source: ExportSource, encoder: TextEncoder, texts: list[str], rows: slice) -> list[np.ndarray]:
    """Φ_D(z) of the phrases in these rows by each pair of heads, float32 (n, Φ_D's width)."""
    if source.label_vectors is not None:
        return [vectors[rows] for vectors in source.label_vectors]
    found = encoder.encode(texts)
    return [vectors[:, :split] for vectors, (split, _) in zip(found, source.widths, strict=False)]


def torch_vectors(model: DualHeadModel, encoder: TextEncoder, texts: Sequence[str]) -> QueryVectors:
    """What torch gives for texts, tokenised as the bundle does; wide ones where `encoder` gives them."""
    narrow, wide = [], []
    with torch.inference_mode():
        for start in range(0, len(texts), _TORCH_BATCH):
            ids, mask = encoder.tokenise(texts[start : start + _TORCH_BATCH])
            found = model.query_vectors(torch.from_numpy(ids), torch.from_numpy(mask))
            narrow.append(found[0].numpy())
            wide.append(found[1].numpy() if encoder.wide_dim else narrow[-1][:, :0])
    return QueryVectors(np.concatenate(narrow), np.concatenate(wide))


def part_cosines(a: np.ndarray, b: np.ndarray, encoder_dim: int) -> np.ndarray:
    """For each row, the lesser of the cosines of its Φ_D parts and of its Φ_C parts.

    Two zeros count as 1, and so does a part without values.

    Args:
        a: (n, dim).
        b: (n, dim).
        encoder_dim: width of the Φ_D part, from the left.

    Returns:
        float64 (n,).
    """
    cosines = []
    for part in (slice(0, encoder_dim), slice(encoder_dim, None)):
        x, y = a[:, part].astype(np.float64), b[:, part].astype(np.float64)
        lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        both_zero = ~x.any(axis=1) & ~y.any(axis=1)
        cosines.append(np.where(both_zero, 1.0, (x * y).sum(axis=1) / np.maximum(lengths, 1e-30)))
    return np.minimum(*cosines)


def check_parity(model: DualHeadModel, encoder: TextEncoder, texts: Sequence[str]) -> Parity:
    """Cosine of torch and ONNX on texts, one query a call in ONNX, as it is served; of all its vectors.

    Raises:
        BidmatchError: it is below 0.9999 somewhere, or the model's vectors are not finite.
    """
    expected = torch_vectors(model, encoder, texts)
    if not all(np.isfinite(vectors).all() for vectors in expected):
        raise BidmatchError(
            "the trained model's vectors are not finite numbers: its training did not converge",
            hint="Train again with lower learning rates (optimiser.*_lr).",
        )
    got = QueryVectors(*(np.empty_like(vectors) for vectors in expected))
    with progress("comparing ONNX with torch", len(texts), "queries") as step:
        for i, text in enumerate(texts):
            found = encoder.run(*encoder.tokenise([text]))
            got.narrow[i], got.wide[i] = found.narrow[0], found.wide[0]
            step.advance()
    splits = [d for d, _ in model.widths[: 2 if encoder.wide_dim else 1]]
    cosines = np.min([part_cosines(*pair) for pair in zip(expected, got, splits, strict=False)], axis=0)
    parity = Parity(
        queries=len(texts),
        min_cosine=round(min(float(cosines.min()), 1.0), 8),
        mean_cosine=round(min(float(cosines.mean()), 1.0), 8),
    )
    finite = all(np.isfinite(vectors).all() for vectors in got)
    if not finite or parity.min_cosine < LEAST_COSINE:
        worst = texts[int(np.argmin(cosines))]
        raise BidmatchError(
            f"the ONNX encoder differs from torch: cosine {parity.min_cosine} for {worst!r}",
            hint="Please report it with the versions of torch, onnx and onnxruntime.",
        )
    return parity
