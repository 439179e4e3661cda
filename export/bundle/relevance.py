"""From a score to how likely the phrase belongs to the query: a calibrated curve, rising, in the manifest."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from export.bundle.strict import Record

MAX_KNOTS = 64

_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0)]


class ReliabilityBin(Record):
    """Pairs whose predicted relevance lies in [low, high) (the last bin holds 1, too).

    Attributes:
        low: see above.
        high: see above.
        pairs: how many.
        predicted: their mean predicted relevance; 0 where there are none.
        clicked: the share of them that was clicked; 0 where there are none.
    """

    low: _Share
    high: _Share
    pairs: _Count
    predicted: _Share
    clicked: _Share


class CalibrationRecord(Record):
    """How likely a phrase that is answered with some score was clicked for the query in the log.

    The curve runs straight from knot to knot, and level before the first and behind the last. The figures
    are out of sample: each half of the queries judged by a curve of the other half.

    Attributes:
        scores: of the knots, strictly rising, at most 64.
        relevance: of the knots, in 0..1, strictly rising.
        depth: phrases of each query's answer that it was made from.
        queries: validation queries.
        pairs: their answered phrases.
        clicked: how many of these were clicked.
        brier: mean squared difference of relevance and click.
        brier_constant: the same if every pair got the share of all clicked ones.
        ece: expected calibration error, Σ_bins pairs / all · |predicted - clicked|.
        bins: ten of equal width.
    """

    scores: Annotated[list[float], Field(min_length=1, max_length=MAX_KNOTS)]
    relevance: Annotated[list[_Share], Field(min_length=1, max_length=MAX_KNOTS)]
    depth: Annotated[int, Field(ge=1)]
    queries: Annotated[int, Field(ge=1)]
    pairs: Annotated[int, Field(ge=1)]
    clicked: _Count
    brier: _Share
    brier_constant: _Share
    ece: _Share
    bins: list[ReliabilityBin]

    @model_validator(mode="after")
    def _rises(self) -> CalibrationRecord:
        if len(self.scores) != len(self.relevance):
            raise ValueError(f"{len(self.scores)} scores do not fit {len(self.relevance)} relevances")
        for values in (self.scores, self.relevance):
            if any(one >= next_one for one, next_one in pairwise(values)):
                raise ValueError("the knots do not rise")
        return self


class Relevance:
    """A bundle's curve. Safe to call from several threads at once.

    Args:
        record: `Manifest.calibration`.
    """

    def __init__(self, record: CalibrationRecord):
        self._scores = np.asarray(record.scores, dtype=np.float64)
        self._relevance = np.asarray(record.relevance, dtype=np.float64)
        self.least_score = lru_cache(maxsize=1024)(self._least_score)

    def of(self, scores: np.ndarray) -> np.ndarray:
        """The relevance of scores, float32 of their shape, in 0..1, never falling as the score rises."""
        return np.interp(scores, self._scores, self._relevance).astype(np.float32)

    def _least_score(self, relevance: float) -> float:
        """The least float32 score with at least this relevance: -inf where all have it, inf where none has.

        Whoever keeps scores at or above it keeps exactly the pairs that are answered with such a relevance.
        """
        wanted, up = np.float32(relevance), np.float32(np.inf)

        def reached(score: np.float32) -> bool:
            return bool(self.of(np.asarray(score)) >= wanted)

        # The float32 values on either side of all knots, which need not be float32 values themselves.
        low, high = (np.float32(self._scores[end]) for end in (0, -1))
        low, high = np.nextafter(low, -up), np.nextafter(high, up)
        if reached(low):
            return -np.inf
        if not reached(high):
            return np.inf
        while np.nextafter(low, up) < high:
            middle = np.float32((np.float64(low) + np.float64(high)) / 2)
            if middle in (low, high):
                middle = np.nextafter(low, up)
            low, high = (low, middle) if reached(middle) else (middle, high)
        return float(high)
