"""What re-scoring with the wide vectors brings and costs, and how many candidates it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from bidmatch.base.console import say
from export.bundle.encoder import QueryVectors, TextEncoder
from export.bundle.format import WIDE_FILES, Metrics, Quality, RescorePoint, RescoreRecord
from export.bundle.read import WideVectors
from export.bundle.rescore import Rescorer
from export.exact import exact_search
from export.vectors import LabelVectors
from trainer.data.dataset import Interactions
from trainer.metrics import evaluate_ranking

JUDGED = ("P@1", "P@5", "recall@10", "recall@100")
# With as many, an answer of 10 phrases is the head of an answer of 100, as it is without re-scoring.
LEAST_CANDIDATES = 100
TRIED = (20, 50, 100, 200, 400)
# Points; less than these figures' standard error on 2,000 queries, which is about one.
TOLERANCE = 0.5
_TIMED_QUERIES = 500


@dataclass(frozen=True)
class Candidates:
    """How many phrases are re-scored for a query.

    Attributes:
        count: that many; 0 where there is no re-scoring.
        curve: the numbers that were tried.
        reason: why this one.
    """

    count: int = 0
    curve: tuple[RescorePoint, ...] = ()
    reason: str = ""


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
    queries: QueryVectors, labels: LabelVectors, truth: sp.csr_matrix, tried: Sequence[int]
) -> list[RescorePoint]:
    """Quality and time for each number of candidates, with exact search in the index's place.

    Args:
        queries: of n held-out texts.
        labels: of L phrases, with wide vectors.
        truth: (n, L).
        tried: numbers of candidates; those above L are taken as L.
    """
    wide, count = labels.wide, len(labels.narrow)
    if wide is None:
        raise ValueError("there are no wide vectors")
    most = min(max(*tried, LEAST_CANDIDATES), count)
    rows, _ = exact_search(queries.narrow, labels.narrow, most, "exact search for candidates")
    encoder, classifier = Rescorer(wide).score(queries.wide, rows)
    scores = encoder + classifier

    def ranking(depth: int) -> np.ndarray:
        return _ordered(rows[:, :depth], scores[:, :depth])[0]

    points = []
    for candidates in sorted({min(number, count) for number in tried}):
        found = evaluate_ranking(ranking(max(candidates, 10)), truth, ks=(1, 5), recall_ks=(10,))
        deep = evaluate_ranking(ranking(max(candidates, 100)), truth, ks=(), recall_ks=(100,))
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


def choose_candidates(points: Sequence[RescorePoint]) -> tuple[int, str]:
    """The least number of candidates, at least 100, that is near the best in every figure, and why.

    Where none is, the one that is behind the best by least.

    Args:
        points: see `try_candidates`, at least one; by rising number of candidates.
    """
    enough = [point for point in points if point.candidates >= LEAST_CANDIDATES] or [points[-1]]
    best = {name: max(point.quality[name] for point in enough) for name in JUDGED}
    behind = [max((best[name] - point.quality[name], name) for name in JUDGED) for point in enough]
    near = [place for place, (points_lost, _) in enumerate(behind) if points_lost <= TOLERANCE]
    place = near[0] if near else behind.index(min(behind))
    what = f"the least within {TOLERANCE:g} points" if near else "the nearest"
    points_lost, worst = behind[place]
    reason = (
        f"{what} of the best in each of {', '.join(JUDGED)} of those tried from {LEAST_CANDIDATES} up; "
        f"{points_lost:.2f} behind in {worst}"
    )
    return enough[place].candidates, reason


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
        return Candidates(given or usual, (), reason)
    tried = TRIED if given is None else (*TRIED, given)
    queries = encoder.encode(validation.queries.to_pylist())
    curve = try_candidates(queries, labels, validation.clicks, tried)
    count, reason = choose_candidates(curve) if given is None else (given, "as asked for")
    return Candidates(count, tuple(curve), reason)


def make_record(
    folder: Path,
    wide: WideVectors,
    queries: np.ndarray,
    rows: np.ndarray,
    candidates: Candidates,
    quality: Quality,
) -> RescoreRecord:
    """What the manifest says of re-scoring, said aloud, too.

    Args:
        folder: with the wide files in it.
        wide: the phrases' vectors.
        queries: float32 (n, wide_dim) to measure the time with, n >= 1.
        rows: int64 (n, c), what the index found for them, at least as many as there are candidates.
        candidates: how many, and why.
        quality: of the bundle, with the index's ranking and the re-scored one.
    """
    narrow, rescored = (judged(figures) if figures else {} for figures in (quality.index, quality.served))
    rows = rows[:, : candidates.count]
    record = RescoreRecord(
        dim=wide.rows.shape[1],
        encoder_dim=wide.encoder_dim,
        candidates=candidates.count,
        bytes=sum((folder / name).stat().st_size for name in WIDE_FILES),
        microseconds=microseconds(wide, queries, rows),
        queries=quality.queries,
        narrow=narrow,
        rescored=rescored,
        curve=list(candidates.curve),
        reason=candidates.reason,
    )
    gains = ", ".join(f"{name} {narrow[name]:.2f} -> {rescored[name]:.2f}" for name in narrow)
    say(
        f"re-scoring {record.candidates} candidates with {record.dim} numbers a phrase in 8 bits "
        f"({record.reason}): "
        f"{gains or 'not measured'}; {record.microseconds:,.0f} µs a query, {record.bytes / 1e6:,.1f} MB"
    )
    if narrow and all(rescored[name] <= narrow[name] for name in JUDGED):
        say("warning: re-scoring gains nothing on the validation queries; --no-rescore leaves it out")
    return record
