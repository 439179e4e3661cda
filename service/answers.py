"""Matches in columns to the objects of a JSON answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from service.engine import Engine, Timings


@dataclass(frozen=True, slots=True)
class Answer:
    """One query's matches, ready for JSON, and what the batch they were found in took."""

    matches: list[dict[str, Any]]
    timings: Timings


def answer(engine: Engine, queries: list[str], k: int, min_score: float | None) -> list[Answer]:
    """One answer a query, in their order; see `Engine.match`."""
    found = engine.match(queries, k, min_score)
    columns = engine.phrases(found.rows).to_pydict()
    ids, phrases = columns.pop("id"), columns.pop("text")
    matches = []
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
        own = {name: values[i] for name, values in columns.items() if values[i] is not None}
        if own:
            match["columns"] = own
        matches.append(match)
    bounds = found.offsets.tolist()
    return [Answer(matches[start:end], found.timings) for start, end in pairwise(bounds)]


def total(answers: list[Answer]) -> Timings:
    """What the batches that these answers were found in took together."""
    return sum({id(one.timings): one.timings for one in answers}.values(), Timings())
