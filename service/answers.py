"""Matches in columns to the objects of a JSON answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.bundle.rescore import to_8_bits
from service.cache import Guard
from service.engine import Engine
from service.matches import Encoded, Matches, Timings
from service.options import MatchOptions

_NOTHING = b"[]"


@dataclass(frozen=True, slots=True)
class Answer:
    """One query's answer.

    Attributes:
        matches: JSON of the list of matches: made where the work is done, not on the event loop.
        count: how many they are.
        best: the score of the first that search found; NaN where it found none.
        timings: what the batch they were found in took.
        guard: when it is no longer right; None where no guards were asked for, or the query has no text.
    """

    matches: bytes
    count: int
    best: float
    timings: Timings
    guard: Guard | None = None


def answer_each(
    engine: Engine, queries: Sequence[str], options: Sequence[MatchOptions], *, guarded: bool
) -> list[Answer]:
    """One answer a query, in their order; see `Engine.find_each`.

    Args:
        engine: what answers.
        queries: n queries.
        options: theirs.
        guarded: whether answers get a guard, for a cache.
    """
    answers: list[Answer] = [Answer(_NOTHING, 0, float("nan"), Timings())] * len(queries)
    version = 0 if engine.live is None else engine.live.version
    for places, one, encoded, matches in engine.find_each(queries, options):
        listed, best, ids = engine.rendered(matches)
        guards = _guards(engine, encoded, matches, ids, one.k, version) if guarded else {}
        counts = np.diff(matches.offsets).tolist()
        for at, (place, count, score) in enumerate(zip(places.tolist(), counts, best.tolist(), strict=True)):
            answers[place] = Answer(listed[at], count, score, matches.timings, guards.get(at))
    return answers


def _guards(
    engine: Engine,
    encoded: Encoded,
    matches: Matches,
    ids: np.ndarray,
    k: int,
    version: int,
) -> dict[int, Guard]:
    """The guards of the queries that have text, by their place; `ids` are the filters, uint64 (n, 4)."""
    vectors = encoded.vectors.wide if engine.rescores else encoded.vectors.narrow
    rows, scales = to_8_bits(vectors, engine.score_split)
    guards = {}
    for at, place in enumerate(encoded.asked.tolist()):
        start, end = int(matches.offsets[place]), int(matches.offsets[place + 1])
        last = float(matches.scores[start:end].min()) if end - start >= k else -np.inf
        guards[place] = Guard(rows[at], scales[at], last, ids[place], version)
    return guards


def total(answers: Sequence[Answer]) -> Timings:
    """What the batches that these answers were found in took together."""
    return sum({id(one.timings): one.timings for one in answers}.values(), Timings())
