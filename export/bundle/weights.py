"""How much each half of a vector counts: score = w_D · cos_D + w_C · cos_C, with w_D + w_C = 2.

The weights lie in the phrases' vectors alone, [w_D Φ_D(z) ⊕ w_C N(Ψ)], so a query's vector, the index and
the search know nothing of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from export.bundle.strict import Record

TOTAL = 2.0
EVEN = (1.0, 1.0)

_Weight = Annotated[float, Field(ge=0, le=TOTAL)]


class WeightPoint(Record):
    """What the queries' answers are worth at one weight.

    Attributes:
        encoder: w_D.
        value: mean over the queries of P@1 + P@5 + recall@10, each in percent.
        gain: how much that is above 1:1.
        error: standard error of the gain, from its spread over the queries (the same ones are asked of both).
    """

    encoder: _Weight
    value: float
    gain: float
    error: float


class HalfWeights(Record):
    """The weights of a vector's halves.

    Attributes:
        encoder: w_D, of the Φ_D half; the Φ_C half has 2 - w_D.
        queries: validation queries that it was chosen on; 0 where it was not chosen.
        curve: every weight tried.
        reason: why this one.
    """

    encoder: _Weight
    queries: Annotated[int, Field(ge=0)]
    curve: list[WeightPoint]
    reason: str

    @property
    def pair(self) -> tuple[float, float]:
        """(w_D, w_C)."""
        return self.encoder, TOTAL - self.encoder


class BlendRecord(Record):
    """The weights in a bundle's vectors.

    Attributes:
        narrow: of the vectors that are searched.
        wide: of those that re-score; None where nothing does.
    """

    narrow: HalfWeights
    wide: HalfWeights | None


def narrow_weights(blend: BlendRecord | None) -> tuple[float, float]:
    """(w_D, w_C) of the vectors that are searched; 1:1 where the bundle has one head alone."""
    return EVEN if blend is None else blend.narrow.pair


def wide_weights(blend: BlendRecord | None) -> tuple[float, float]:
    """(w_D, w_C) of the vectors that re-score, likewise."""
    return EVEN if blend is None or blend.wide is None else blend.wide.pair
