"""What encoding costs on this machine, measured: how long a call takes, which texts to encode together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np

# The weight of what was measured before falls by this with each call, so some hundred calls count.
_MEMORY = 0.99
# A batch grows as long as that saves more than this share of the time per text.
_WORTH = 0.05
_LARGEST_BATCH = 128


class EncodeCost:
    """Seconds of an encoder call of n texts, padded to t tokens: a + b · n · t, fitted to calls as they go.

    Several threads may tell and ask at once.

    Attributes:
        best_batch: texts beyond which a batch gains nothing per text; 1 until `calibrate` ran.
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

    def calibrate(self, run: Callable[[int], tuple[int, float]], largest: int = _LARGEST_BATCH) -> None:
        """Find `best_batch` by calls of 1, 2, 4, ... texts.

        Args:
            run: encodes so many texts; gives their width and the seconds it took.
            largest: no larger batch is tried, or taken.
        """
        sizes, costs = [], []
        size = 1
        while size <= largest:
            timed = sorted(run(size) for _ in range(3))
            width, seconds = min(timed, key=lambda one: one[1])
            self.observe(size, width, seconds)
            sizes.append(size)
            costs.append(seconds / size)
            gains = [1 - new / old for old, new in pairwise(costs)]
            if len(gains) > 1 and max(gains[-2:]) < _WORTH:
                break
            size *= 2
        least = min(costs)
        self.best_batch = next(
            size for size, cost in zip(sizes, costs, strict=True) if cost <= (1 + _WORTH) * least
        )
