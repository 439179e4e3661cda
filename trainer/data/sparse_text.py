"""Rows of `label:value label:value ...`, as sparse matrices are written, parsed in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
_ROW = rf"^\s*(\d{{1,15}}:{_NUMBER}(\s+|$))*$"
_INTEGERS = r"^\s*\d{1,15}[\s,]+\d{1,15}\s*$"


@dataclass(frozen=True)
class SparseRows:
    """Parsed rows.

    Attributes:
        good: bool (n,), which rows could be parsed; the others have no pair.
        counts: int64 (n,), pairs of each row.
        labels: int64 (pairs,).
        values: float64 (pairs,).
    """

    good: np.ndarray
    counts: np.ndarray
    labels: np.ndarray
    values: np.ndarray


def parse_sparse_rows(rows: Sequence[str]) -> SparseRows:
    """Parse rows of pairs `label:value`, set off by white space."""
    lines = pa.array(rows, pa.large_string())
    good = pc.match_substring_regex(lines, pattern=_ROW).to_numpy(zero_copy_only=False)
    counts = np.where(good, pc.count_substring(lines, ":").to_numpy(), 0).astype(np.int64)
    numbers = _numbers([row for row, fine in zip(rows, good, strict=True) if fine], ":")
    return SparseRows(good, counts, numbers[0::2].astype(np.int64), numbers[1::2])


def parse_integer_pairs(rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Parse rows of two whole numbers, set off by white space or a comma.

    Returns:
        which rows could be parsed, bool (n,); their numbers, int64 (good rows, 2).
    """
    lines = pa.array(rows, pa.large_string())
    good = pc.match_substring_regex(lines, pattern=_INTEGERS).to_numpy(zero_copy_only=False)
    numbers = _numbers([row for row, fine in zip(rows, good, strict=True) if fine], ",")
    return good, numbers.astype(np.int64).reshape(-1, 2)


def _numbers(rows: list[str], mark: str) -> np.ndarray:
    """All numbers of checked rows, float64; `mark` stands between numbers, as white space does."""
    text = " ".join(rows).replace(mark, " ")
    return np.fromstring(text, dtype=np.float64, sep=" ") if text.strip() else np.empty(0)
