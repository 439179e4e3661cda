"""Exact search over many queries with a progress bar: the yardstick of quantisation and index."""

from __future__ import annotations

import numpy as np

from bidmatch.base.console import progress
from export.bundle.index import exact_topk

_QUERIES_A_STEP = 256


def exact_search(
    queries: np.ndarray, vectors: np.ndarray, k: int, label: str
) -> tuple[np.ndarray, np.ndarray]:
    """`exact_topk`, said aloud as `label`: rows int64 (n, min(k, L)), scores float32 alike."""
    rows, scores = [], []
    with progress(label, len(queries), "queries") as step:
        for start in range(0, len(queries), _QUERIES_A_STEP):
            block = queries[start : start + _QUERIES_A_STEP]
            found = exact_topk(block, vectors, k)
            rows.append(found[0])
            scores.append(found[1])
            step.advance(len(block))
    return np.concatenate(rows), np.concatenate(scores)
