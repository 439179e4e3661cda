"""Holding out queries by their hash: never by pair, whatever the order of the log."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bidmatch.base.strings import hash64, mix64
from trainer.data.dataset import Interactions


def held_out(queries: pa.Array, share: float, seed: int, salt: str) -> np.ndarray:
    """Which queries are held out: bool (N,), true with probability `share`: a hash of (seed, salt, query)."""
    salted = mix64(hash64(pa.array([f"{salt}:{seed}"])))
    uniform = (mix64(hash64(queries) ^ salted) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform < share


def split_by_query(
    interactions: Interactions, share: float, seed: int, *, salt: str = "validation"
) -> tuple[Interactions, Interactions]:
    """Split into (kept, held out), order preserved; a query's side depends on (seed, salt, query) alone.

    Args:
        interactions: what to split; its queries are distinct.
        share: expected share held out, 0 <= share < 1.
        seed: changes the draw.
        salt: names the purpose. Two splits of the same data, one inside the other, need different salts:
            `test` is taken by the readers, so what they leave for training splits evenly under any other.
    """
    out = held_out(interactions.queries, share, seed, salt)
    if out.all():
        out[:] = False
    return interactions.take(np.flatnonzero(~out)), interactions.take(np.flatnonzero(out))
