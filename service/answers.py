"""Matches in columns to the objects of a JSON answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import orjson

from service.engine import Engine, Timings

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True, slots=True)
class Answer:
    """One query's answer.

    Attributes:
        matches: JSON of the list of matches: made where the work is done, not on the event loop.
        count: how many they are.
        timings: what the batch they were found in took.
    """

    matches: bytes
    count: int
    timings: Timings


def answer(engine: Engine, queries: list[str], k: int, min_score: float | None) -> list[Answer]:
    """One answer a query, in their order; see `Engine.match`."""
    found = engine.match(queries, k, min_score)
    columns = engine.phrases(found.rows).to_pydict()
    ids, phrases = columns["id"], columns["text"]
    users = engine.user_columns.names
    matches = []
    relevance = found.relevance
    # Scores stay numpy.float32, which orjson writes with the fewest digits that give the same float32.
    for i, (score, encoder, classifier, exact) in enumerate(
        zip(found.scores, found.encoder, found.classifier, found.exact, strict=True)
    ):
        match = {
            "id": ids[i],
            "phrase": phrases[i],
            "score": score,
            "parts": {"encoder": encoder, "classifier": classifier},
            "source": "exact" if exact else "index",
        }
        if relevance is not None:
            match["relevance"] = relevance[i]
        own = {name: columns[name][i] for name in users if columns[name][i] is not None}
        if own:
            match["columns"] = own
        matches.append(match)
    return [
        Answer(orjson.dumps(matches[start:end], default=str, option=_OPTIONS), end - start, found.timings)
        for start, end in pairwise(found.offsets.tolist())
    ]


def total(answers: list[Answer]) -> Timings:
    """What the batches that these answers were found in took together."""
    return sum({id(one.timings): one.timings for one in answers}.values(), Timings())
