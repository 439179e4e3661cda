"""The compiled part of answering, from `native/`: JSON of matches. The GIL is released while it works."""

from collections.abc import Sequence

import numpy as np

class Renderer:
    """Writes the matches of queries as JSON. Safe to use from several threads at once.

    Ids and texts are those of the bundle's phrases, as Arrow has them: text i is
    `data[offsets[i]:offsets[i + 1]]`, UTF-8.

    Args:
        id_offsets: int64 (L + 1).
        ids: uint8.
        text_offsets: int64 (L + 1).
        texts: uint8.

    Raises:
        ValueError: there are not as many ids as texts, or offsets lead beyond the data.
    """

    def __init__(
        self, id_offsets: np.ndarray, ids: np.ndarray, text_offsets: np.ndarray, texts: np.ndarray
    ) -> None: ...
    def render(
        self,
        offsets: np.ndarray,
        rows: np.ndarray,
        scores: np.ndarray,
        encoder: np.ndarray,
        classifier: np.ndarray,
        *,
        relevance: np.ndarray | None,
        exact: np.ndarray,
        others: Sequence[tuple[str, str, bytes]],
        tails: Sequence[bytes] | None,
    ) -> tuple[list[bytes], np.ndarray, np.ndarray]:
        """Write the matches of n queries, in columns as `service.matches.Matches` has them.

        Numbers have the fewest digits that give the same float32.

        Args:
            offsets: int64 (n + 1).
            rows: int64 (m); those from L on are none of the bundle's.
            scores: float32 (m); likewise the next two.
            encoder: see `scores`.
            classifier: see `scores`.
            relevance: float32 (m), or None.
            exact: bool (m).
            others: id, text and tail of each row from L on, in the order of the matches.
            tails: what stands behind the source in each match, JSON that begins with a comma; of the bundle's
                rows only. None: nothing.

        Returns:
            A JSON list for each query; the score of each query's first match that is not exact, float64
            (n,), NaN without one; a filter of the ids in each, uint64 (n, 4), as `id_filter` gives it.

        Raises:
            ValueError: the arguments do not fit each other.
            IndexError: a row is negative.
        """

def id_filter(ids: Sequence[str]) -> np.ndarray:
    """A Bloom filter of ids: uint64 (4,). What a filter lacks of another's bits was not among its ids."""
