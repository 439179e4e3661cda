"""What re-scoring with the wide vectors brings and costs, and how many candidates it is given."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bidmatch.base.console import say
from export.bundle.encoder import QueryVectors, TextEncoder
from export.bundle.format import WIDE_FILES, Metrics, RescorePoint, RescoreRecord, depth_of
from export.bundle.read import WideVectors
from export.bundle.rescore import Rescorer
from export.exact import exact_search
from export.vectors import LabelVectors
from trainer.data.dataset import Interactions
from trainer.metrics import evaluate_ranking, most_filtered, without_filtered

_OF_TEN = ("P@1", "P@5", "recall@10")
_OF_HUNDRED = "recall@100"
JUDGED = (*_OF_TEN, _OF_HUNDRED)
LEAST_CANDIDATES = 100
TRIED = (20, 50, 100, 200, 400)
# Points; less than these figures' standard error on 2,000 queries, which is about one.
TOLERANCE = 0.5
_TIMED_QUERIES = 500


@dataclass(frozen=True)
class Candidates:
    """How many phrases are re-scored for a query, see RescoreRecord.

    Attributes:
        count: least number; 0 where there is no re-scoring.
        per_match: number for each of the k asked for.
        curve: the numbers that were tried.
        reason: why these.
    """

    count: int = 0
    per_match: int = 1
    curve: tuple[RescorePoint, ...] = ()
    reason: str = ""

    def depth(self, k: int) -> int:
        """Phrases that are searched for when k are asked for."""
        return depth_of(k, self.count, self.per_match)


def by_wide_score(wide: WideVectors, queries: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Candidates in the order of their wide scores, equal scores by row, as the service orders them.

    Args:
        wide: the phrases' vectors.
        queries: float32 (n, wide_dim).
        rows: int64 (n, c), rows of phrases.

    Returns:
        int64 (n, c) rows, best first, and their scores, float32 (n, c).
    """
    encoder, classifier = Rescorer(wide).score(queries, rows)
    return _ordered(rows, encoder + classifier)


def _ordered(rows: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((rows, -scores), axis=1)
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)


def served_exactly(queries: QueryVectors, labels: LabelVectors, depth: int, label: str) -> np.ndarray:
    """The ranking that is served, with exact search in the index's place: int64 (n, min(depth, L)).

    Args:
        queries: of n texts.
        labels: of L phrases.
        depth: phrases searched for, all of which are re-scored where the bundle does that.
        label: of the progress.
    """
    rows, _ = exact_search(queries.narrow, labels.narrow, depth, label)
    return rows if labels.wide is None else by_wide_score(labels.wide, queries.wide, rows)[0]


def microseconds(wide: WideVectors, queries: np.ndarray, rows: np.ndarray) -> float:
    """Mean time of re-scoring one query's candidates, rows int64 (n, c), n >= 1, one query a call."""
    rescorer = Rescorer(wide)
    queries, rows = queries[:_TIMED_QUERIES], rows[:_TIMED_QUERIES]
    rescorer.score(queries[:1], rows[:1])
    started = time.perf_counter_ns()
    for query in range(len(rows)):
        rescorer.score(queries[query : query + 1], rows[query : query + 1])
    return round((time.perf_counter_ns() - started) / 1e3 / len(rows), 1)


def try_candidates(
    queries: QueryVectors, labels: LabelVectors, validation: Interactions, tried: Sequence[int]
) -> list[RescorePoint]:
    """Quality and time for each number of candidates, with exact search in the index's place.

    Args:
        queries: of n held-out texts.
        labels: of L phrases, with wide vectors.
        validation: the texts and their labels.
        tried: numbers of candidates; those above L are taken as L.
    """
    wide, count = labels.wide, len(labels.narrow)
    if wide is None:
        raise ValueError("there are no wide vectors")
    more = most_filtered(validation.filtered)
    most = min(max(*tried, LEAST_CANDIDATES) + more, count)
    rows, _ = exact_search(queries.narrow, labels.narrow, most, "exact search for candidates")
    encoder, classifier = Rescorer(wide).score(queries.wide, rows)
    scores = encoder + classifier

    def ranking(depth: int) -> np.ndarray:
        ordered = _ordered(rows[:, : depth + more], scores[:, : depth + more])[0]
        return without_filtered(ordered, validation.filtered, depth)

    points = []
    for candidates in sorted({min(number, count) for number in tried}):
        found = evaluate_ranking(ranking(max(candidates, 10)), validation.clicks, ks=(1, 5), recall_ks=(10,))
        deep = evaluate_ranking(ranking(max(candidates, 100)), validation.clicks, ks=(), recall_ks=(100,))
        points.append(
            RescorePoint(
                candidates=candidates,
                quality=judged({**found, **deep}),
                microseconds=microseconds(wide, queries.wide, rows[:, :candidates]),
            )
        )
    return points


def judged(metrics: Metrics) -> Metrics:
    """The figures by which re-scoring is judged."""
    return {name: round(float(metrics[name]), 4) for name in JUDGED}


def choose_candidates(points: Sequence[RescorePoint]) -> Candidates:
    """The least numbers of candidates, from 100 up, that do about as well as more.

    P@1, P@5 and recall@10 decide on the number for every query; recall@100 on the number for each of the k
    asked for. Each must be within half a point of the best that was tried.

    Args:
        points: see `try_candidates`, at least one; by rising number of candidates.
    """
    enough = [point for point in points if point.candidates >= LEAST_CANDIDATES] or [points[-1]]
    ten, why_ten = _least(enough, _OF_TEN)
    hundred, why_hundred = _least(enough, (_OF_HUNDRED,))
    per_match = max(1, math.ceil(hundred / 100))
    reason = f"{ten} candidates: {why_ten}; {per_match} for each match asked for: {why_hundred}"
    return Candidates(ten, per_match, tuple(points), reason)


def _least(points: Sequence[RescorePoint], names: Sequence[str]) -> tuple[int, str]:
    """The least number of candidates near the best in all these figures, or the nearest to it, and why."""
    best = {name: max(point.quality[name] for point in points) for name in names}
    behind = [max((best[name] - point.quality[name], name) for name in names) for point in points]
    near = [place for place, (points_lost, _) in enumerate(behind) if points_lost <= TOLERANCE]
    place = near[0] if near else behind.index(min(behind))
    what = f"the least within {TOLERANCE:g} points of" if near else "the nearest to"
    points_lost, worst = behind[place]
    count = points[place].candidates
    return count, f"{count} are {what} the best in {', '.join(names)}, {points_lost:.2f} behind in {worst}"


def candidates_for(
    validation: Interactions, encoder: TextEncoder, labels: LabelVectors, asked: int | None
) -> Candidates:
    """How many phrases to re-score: as asked, or chosen on validation queries with the fp32 encoder."""
    if labels.wide is None:
        return Candidates()
    given = None if asked is None else min(asked, len(labels.narrow))
    if not len(validation):
        usual = min(LEAST_CANDIDATES, len(labels.narrow))
        reason = "there are no validation queries to choose on" if given is None else "as asked for"
        return Candidates(given or usual, 1, (), reason)
    tried = TRIED if given is None else (*TRIED, given)
    queries = encoder.encode(validation.queries.to_pylist())
    curve = try_candidates(queries, labels, validation, tried)
    return choose_candidates(curve) if given is None else Candidates(given, 1, tuple(curve), "as asked for")


def make_record(
    folder: Path,
    wide: WideVectors,
    queries: np.ndarray,
    rows: np.ndarray,
    candidates: Candidates,
    figures: tuple[Metrics, Metrics] | None,
    judged_on: int,
) -> RescoreRecord:
    """What the manifest says of re-scoring, said aloud, too.

    Args:
        folder: with the wide files in it.
        wide: the phrases' vectors.
        queries: float32 (n, wide_dim) to measure the time with, n >= 1.
        rows: int64 (n, candidates.count), what the index found for them.
        candidates: how many, and why.
        figures: those by which it is judged, by the narrow vectors and after re-scoring, both through the
            index; None where they were not measured.
        judged_on: queries behind them.
    """
    narrow, rescored = ({}, {}) if figures is None else map(judged, figures)
    record = RescoreRecord(
        dim=wide.rows.shape[1],
        encoder_dim=wide.encoder_dim,
        candidates=candidates.count,
        per_match=candidates.per_match,
        bytes=sum((folder / name).stat().st_size for name in WIDE_FILES),
        microseconds=microseconds(wide, queries, rows),
        queries=judged_on,
        narrow=narrow,
        rescored=rescored,
        curve=list(candidates.curve),
        reason=candidates.reason,
    )
    gains = ", ".join(f"{name} {narrow[name]:.2f} -> {rescored[name]:.2f}" for name in narrow)
    say(
        f"re-scoring {record.candidates} candidates ({record.per_match} a match) with {record.dim} numbers "
        f"a phrase in 8 bits ({record.reason}): "
        f"{gains or 'not measured'}; {record.microseconds:,.0f} µs a query, {record.bytes / 1e6:,.1f} MB"
    )
    if narrow and all(rescored[name] <= narrow[name] for name in JUDGED):
        say("warning: re-scoring gains nothing on the validation queries; --no-rescore leaves it out")
    return record
