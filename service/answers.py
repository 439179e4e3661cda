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
from service.fragments import Fragment
from service.matches import Encoded, Matches, Timings
from service.options import MatchOptions

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_NOTHING = b"[]"
_SOURCES = (b"index", b"live", b"exact")


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
        fragments = engine.fragments(matches)
        made = _rendered(fragments, matches, len(engine))
        guards = _guards(engine, encoded, matches, fragments, one.k, version) if guarded else {}
        offsets = matches.offsets.tolist()
        best = _best_found(matches).tolist()
        for at, (place, (start, end)) in enumerate(zip(places.tolist(), pairwise(offsets), strict=True)):
            listed = b"[%b]" % b",".join(made[start:end])
            answers[place] = Answer(listed, end - start, best[at], matches.timings, guards.get(at))
    return answers


def _best_found(matches: Matches) -> np.ndarray:
    """The score of each query's first match that search found, NaN without one: float64 (n,)."""
    best = np.full(len(matches), np.nan)
    found = np.flatnonzero(~matches.exact)
    owners = np.searchsorted(matches.offsets, found, side="right") - 1
    first = np.ones(len(found), bool)
    first[1:] = owners[1:] != owners[:-1]
    best[owners[first]] = matches.scores[found[first]]
    return best


def _rendered(fragments: Sequence[Fragment], found: Matches, live: int) -> list[bytes]:
    """JSON of each match; rows from `live` on are live phrases."""
    columns = [found.scores, found.encoder, found.classifier]
    if found.relevance is not None:
        columns.append(found.relevance)
    # orjson writes float32 with the fewest digits that give the same float32.
    numbers = orjson.dumps(np.stack(columns, axis=1), option=_OPTIONS)[2:-2].split(b"],[")
    sources = np.where(found.exact, 2, found.rows >= live).tolist()
    made = []
    for fragment, number, source in zip(fragments, numbers, sources, strict=bool(fragments)):
        score, encoder, classifier, *relevance = number.split(b",")
        made.append(
            b'%b%b,"parts":{"encoder":%b,"classifier":%b},"source":"%b"%b%b'
            % (
                fragment.head,
                score,
                encoder,
                classifier,
                _SOURCES[source],
                b',"relevance":%b' % relevance[0] if relevance else b"",
                fragment.tail,
            )
        )
    return made


def _guards(
    engine: Engine,
    encoded: Encoded,
    matches: Matches,
    fragments: Sequence[Fragment],
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
        ids = id_filter([one.id for one in fragments[start:end]])
        guards[place] = Guard(rows[at], scales[at], last, ids, version)
    return guards


def total(answers: Sequence[Answer]) -> Timings:
    """What the batches that these answers were found in took together."""
    return sum({id(one.timings): one.timings for one in answers}.values(), Timings())
