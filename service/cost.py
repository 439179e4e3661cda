"""What encoding costs on this machine, measured: how long a call takes, which texts to encode together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np

# The weight of what was measured before falls by this with each call, so some hundred calls count.
_MEMORY = 0.99
# A batch is large enough where what every batch costs, whatever its size, is this share of its time.
_FIXED_SHARE = 0.005
LARGEST_BATCH = 128
# So many queries are matched alone and at once to find out what a batch costs, so often; the quickest counts.
_SAMPLE, _TRIES = 16, 2


class EncodeCost:
    """Seconds of an encoder call of n texts, padded to t tokens: a + b · n · t, fitted to calls as they go.

    Several threads may tell and ask at once.

    Attributes:
        best_batch: queries beyond which a batch gains nothing per query; 1 until `calibrate` ran.
    """

    def __init__(self) -> None:
        self.best_batch = 1
        self._lock = threading.Lock()
        # Sums over calls of 1, x, x², y, x · y, for x = n · t and y seconds.
        self._sums = np.zeros(5)
        self._call, self._token = 0.0, 1.0

    def observe(self, texts: int, width: int, seconds: float) -> None:
        """A call of `texts` texts, padded to `width` tokens, took `seconds`."""
        x = float(texts * width)
        with self._lock:
            self._sums *= _MEMORY
            self._sums += (1.0, x, x * x, seconds, x * seconds)
            weight, sx, sxx, sy, sxy = self._sums.tolist()
            spread = weight * sxx - sx * sx
            if spread <= 1e-6 * weight * sxx:
                return
            token = (weight * sxy - sx * sy) / spread
            call = (sy - token * sx) / weight
            if token <= 0 or call < 0:
                # Noise; through the origin the slope is always sound.
                token, call = sxy / sxx, 0.0
            self._call, self._token = call, token

    def seconds(self, texts: int, width: int) -> float:
        """How long a call would take."""
        return self._call + self._token * texts * width

    def groups(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Texts to encode in one call each, so that all calls together take the least time.

        Args:
            lengths: tokens of each text, int64 (n,).

        Returns:
            Indices into `lengths`, every one once; a group holds neighbours in the order of length.
        """
        order = np.argsort(lengths, kind="stable")
        distinct, first = np.unique(lengths[order], return_index=True)
        if len(distinct) < 2:
            return [order]
        ends = np.append(first[1:], len(order)).tolist()
        starts, widths = first.tolist(), np.maximum(distinct, 1).tolist()
        # least[j]: seconds for the texts of the j shortest lengths; cut[j]: where its last group begins.
        least, cut = [0.0], [0]
        for j, end in enumerate(ends):
            tries = [least[i] + self.seconds(end - starts[i], widths[j]) for i in range(j + 1)]
            best = min(range(j + 1), key=tries.__getitem__)
            least.append(tries[best])
            cut.append(best)
        groups: list[np.ndarray] = []
        j = len(ends)
        while j:
            groups.append(order[starts[cut[j]] : ends[j - 1]])
            j = cut[j]
        return groups[::-1]

    def calibrate(
        self,
        queries: Sequence[str],
        encode: Callable[[Sequence[str]], tuple[int, float]],
        match: Callable[[Sequence[str]], float],
    ) -> None:
        """Find out what a call of the encoder costs, and `best_batch`.

        Args:
            queries: some of them.
            encode: encodes texts; gives their width and the seconds it took.
            match: does all that is done for a batch of queries; gives the seconds it took.
        """
        some = list(islice(cycle(queries), _SAMPLE))
        for texts in ([query] for query in some):
            self.observe(1, *encode(texts))
        for _ in range(_TRIES):
            self.observe(_SAMPLE, *encode(some))
        alone = min(sum(match([query]) for query in some) for _ in range(_TRIES))
        self.best_batch = large_enough(alone, min(match(some) for _ in range(_TRIES)), _SAMPLE)


def large_enough(alone: float, together: float, count: int) -> int:
    """Queries of a batch whose fixed cost no longer matters, 1 to `LARGEST_BATCH`.

    Args:
        alone: seconds that `count` queries take in batches of one.
        together: in one batch.
        count: at least 2.
    """
    fixed = max(0.0, (alone - together) / (count - 1))
    each = (together - fixed) / count
    if fixed >= _FIXED_SHARE * LARGEST_BATCH * each:
        return LARGEST_BATCH
    return max(1, round(fixed / (_FIXED_SHARE * each)))
