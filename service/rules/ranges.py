"""Gathering many slices of one array at once."""

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
