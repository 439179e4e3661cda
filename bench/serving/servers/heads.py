"""The bundle's heads in numpy, for services that have an encoder of their own."""

from __future__ import annotations

import numpy as np


class Heads:
    """[N(tanh(W_1 x + b_1)) ⊕ N(W_2 x + b_2)] of Φ(x), as the bundle's encoder gives it.

    Args:
        file: with `g1`, `b1`, `g2`, `b2` and `length` (`.npz`).

    Attributes:
        length: mean length of Φ(x), where an encoder gives it at unit length.
    """

    def __init__(self, file: str):
        with np.load(file) as weights:
            self._g1, self._b1 = weights["g1"].T.copy(), weights["b1"]
            self._g2, self._b2 = weights["g2"].T.copy(), weights["b2"]
            self.length = float(weights["length"])

    def __call__(self, phi: np.ndarray) -> np.ndarray:
        """Float32 (n, 64) of float32 (n, 384)."""
        d = np.tanh(phi @ self._g1 + self._b1)
        c = phi @ self._g2 + self._b2
        parts = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (d, c)]
        return np.concatenate(parts, axis=1)
