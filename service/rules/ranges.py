"""Slices of one array, many at once, and arrays in order."""

from __future__ import annotations

import numpy as np


def places(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Every place of n slices, one slice after the other.

    Args:
        starts: (n,), where each slice starts.
        counts: (n,), how long each slice is.

    Returns:
        int64 (sum of counts,).
    """
    counts = counts.astype(np.int64, copy=False)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts.astype(np.int64, copy=False) - (ends - counts), counts)


def in_order(values: np.ndarray) -> np.ndarray:
    """The values ascending, none twice; a new array."""
    values = np.sort(values)
    # Quicker than np.unique, which hashes first.
    return values[np.r_[True, values[1:] != values[:-1]][: len(values)]]
