"""Matches in columns to the objects of a JSON answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import orjson

from export.bundle.rescore import to_8_bits
from service.cache import Guard, id_filter
from service.engine import Engine
from service.matches import Encoded, Matches, Timings
from service.options import MatchOptions

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
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
        made = _answers(engine, matches)
        guards = _guards(engine, encoded, matches, made, one.k, version) if guarded else {}
        spans = pairwise(matches.offsets.tolist())
        for at, (place, (start, end)) in enumerate(zip(places.tolist(), spans, strict=True)):
            search = np.flatnonzero(~matches.exact[start:end])
            best = float(matches.scores[start + search[0]]) if len(search) else float("nan")
            listed = orjson.dumps(made[start:end], default=str, option=_OPTIONS)
            answers[place] = Answer(listed, end - start, best, matches.timings, guards.get(at))
    return answers


def _answers(engine: Engine, found: Matches) -> list[dict[str, object]]:
    ids, phrases, columns = engine.named().take(found.rows)
    live = len(engine)
    relevance = found.relevance
    made = []
    # Scores stay numpy.float32, which orjson writes with the fewest digits that give the same float32.
    for i, (row, score, encoder, classifier, exact) in enumerate(
        zip(
            found.rows.tolist(),
            found.scores,
            found.encoder,
            found.classifier,
            found.exact.tolist(),
            strict=True,
        )
    ):
        match: dict[str, object] = {
            "id": ids[i],
            "phrase": phrases[i],
            "score": score,
            "parts": {"encoder": encoder, "classifier": classifier},
            "source": "exact" if exact else "live" if row >= live else "index",
        }
        if relevance is not None:
            match["relevance"] = relevance[i]
        if columns[i]:
            match["columns"] = columns[i]
        made.append(match)
    return made


def _guards(
    engine: Engine,
    encoded: Encoded,
    matches: Matches,
    made: Sequence[dict[str, object]],
    k: int,
    version: int,
) -> dict[int, Guard]:
    """The guards of the queries that have text, by their place."""
    vectors = encoded.vectors.wide if engine.rescores else encoded.vectors.narrow
    rows, scales = to_8_bits(vectors, engine.score_split)
    guards = {}
    for at, place in enumerate(encoded.asked.tolist()):
        start, end = int(matches.offsets[place]), int(matches.offsets[place + 1])
        last = float(matches.scores[start:end].min()) if end - start >= k else -np.inf
        ids = id_filter([str(match["id"]) for match in made[start:end]])
        guards[place] = Guard(rows[at], scales[at], last, ids, version)
    return guards


def total(answers: Sequence[Answer]) -> Timings:
    """What the batches that these answers were found in took together."""
    return sum({id(one.timings): one.timings for one in answers}.values(), Timings())
