"""Search narrow, rank wide: the phrases that the index found, scored again with wider vectors in 8 bits."""

from __future__ import annotations

import numpy as np

from export.bundle import _native
from export.bundle.read import WideVectors

_LARGEST = 127


def to_8_bits(vectors: np.ndarray, encoder_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in 8 bits: value times the scale of its row and part, each off by half a scale at most.

    The scale is the part's largest magnitude / 127; a part without values, or of zeros alone, has scale 0.

    Args:
        vectors: float32 (n, dim), finite.
        encoder_dim: width of the Φ_D part, from the left; the rest is the Φ_C part.

    Returns:
        int8 (n, dim) in -127..127, and scales, float32 (n, 2).
    """
    rows = np.empty(vectors.shape, dtype=np.int8)
    scales = np.zeros((len(vectors), 2), dtype=np.float32)
    for part, columns in enumerate((slice(0, encoder_dim), slice(encoder_dim, None))):
        values = vectors[:, columns]
        scales[:, part] = np.abs(values).max(axis=1, initial=0.0) / _LARGEST
        divisor = np.where(scales[:, part] > 0, scales[:, part], 1.0)
        # Of magnitudes near the least there are, a quotient can come out above 127.
        rows[:, columns] = np.clip(np.rint(values / divisor[:, None]), -_LARGEST, _LARGEST)
    return rows, scales


class Rescorer:
    """Scores phrases by the wide vectors of a bundle. Safe to call from several threads at once.

    Args:
        wide: `Bundle.wide`.

    Attributes:
        dim: width of the wide vectors.
    """

    def __init__(self, wide: WideVectors):
        self.dim = wide.rows.shape[1]
        self._wide = wide

    def score(self, queries: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both weighted cosines of each query and each of its phrases, the two parts of the score.

        Args:
            queries: float32 (n, dim), the wide [Φ_D(x) ⊕ N(Φ_C(x))].
            rows: int64 (n, c), rows of the bundle's phrases, -1 for none, which scores 0.

        Returns:
            The encoder's and the classifier's part, float32 (n, c) each, between plus and minus the part's
            weight; of a head that is switched off, 0.

        Raises:
            ValueError: the queries have another width, or are not as many as there are lists of rows.
            IndexError: there is no such row.
        """
        if queries.ndim != 2 or queries.shape[1] != self.dim or len(queries) != len(rows):
            raise ValueError(
                f"queries of shape {queries.shape} do not fit {len(rows)} lists, width {self.dim}"
            )
        encoder, classifier = _native.score_wide(
            np.ascontiguousarray(queries, np.float32),
            np.ascontiguousarray(rows, np.int64),
            self._wide.rows,
            self._wide.scales,
            split=self._wide.encoder_dim,
            encoder_weight=self._wide.weights[0],
            classifier_weight=self._wide.weights[1],
        )
        return encoder, classifier
