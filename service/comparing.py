"""Compares what two bundles answer to one query log."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from bidmatch.base import text
from bidmatch.base.console import progress
from bidmatch.base.errors import ConfigError
from service.engine import Engine
from service.options import MatchOptions
from service.scoring.distinct import LogCounts, write_distinct
from service.scoring.parts import each_part, matches_of
from service.scoring.queries import BadLines, read_log
from service.scoring.source import find_inputs

By = Literal["id", "text"]
_SAMPLED = 10_000


class Figures(BaseModel):
    """What a comparison comes to under one weighting of the queries.

    Attributes:
        queries: their weight.
        coverage_a: percent of them with a match in A; `coverage_b` likewise.
        matches_a: matches a query in A; `matches_b` likewise.
        overlap: percent of A's matches that are also B's, mean over queries with a match in A; None: no such.
        same_first: percent with the same first match, of queries with a match in both; None: no such.
        gained: weight of queries with matches in B alone; `lost`: in A alone.
        score_shift: mean of B's score less A's over common pairs; None: no such.
    """

    queries: int
    coverage_a: float
    coverage_b: float
    matches_a: float
    matches_b: float
    overlap: float | None
    same_first: float | None
    gained: int
    lost: int
    score_shift: float | None


class Comparison(BaseModel):
    """Two bundles on one log.

    Attributes:
        bundle_a: id of A; `bundle_b` of B.
        scores_comparable: whether both bundles are of one model.
        by: what tells that two phrases are the same.
        k: most matches a query.
        rows: queries of the log, empty ones included.
        skipped: bad lines that were left out.
        queries: figures with each distinct query once.
        traffic: with each as often as the log has it.
    """

    bundle_a: str
    bundle_b: str
    scores_comparable: bool
    by: By
    k: int
    rows: int
    skipped: int
    queries: Figures
    traffic: Figures


@dataclass(frozen=True)
class Answers:
    """The matches of n queries, by query, best first.

    Attributes:
        rows: int64 (m), the query.
        names: m ids, or keys of texts; none twice for one query.
        scores: float64 (m).
    """

    rows: np.ndarray
    names: list[str]
    scores: np.ndarray


def tally(a: Answers, b: Answers, counts: np.ndarray) -> np.ndarray:
    """Sums over n queries under both weightings, which add up over parts of a log: float64 (2, 11).

    Args:
        a: A's matches.
        b: B's.
        counts: int64 (n,), how often the log has each query.
    """
    n = len(counts)
    codes = pa.array([*a.names, *b.names], pa.large_string()).dictionary_encode()
    numbers = codes.indices.to_numpy().astype(np.int64)
    apart = max(1, len(codes.dictionary))
    of_a, of_b = a.rows * apart + numbers[: len(a.names)], b.rows * apart + numbers[len(a.names) :]
    _, at_a, at_b = np.intersect1d(of_a, of_b, assume_unique=True, return_indices=True)
    many_a, many_b = np.bincount(a.rows, minlength=n), np.bincount(b.rows, minlength=n)
    common = np.bincount(a.rows[at_a], minlength=n)
    shifts = np.bincount(a.rows[at_a], b.scores[at_b] - a.scores[at_a], minlength=n)
    rank_a, rank_b = _ranks(a.rows)[at_a], _ranks(b.rows)[at_b]
    same_first = np.bincount(a.rows[at_a[(rank_a == 0) & (rank_b == 0)]], minlength=n)
    has_a, has_b = many_a > 0, many_b > 0
    columns = np.stack(
        [
            np.ones(n),
            has_a,
            has_b,
            many_a,
            many_b,
            common / np.maximum(many_a, 1),
            has_a & has_b,
            same_first,
            has_b & ~has_a,
            common,
            shifts,
        ],
        axis=1,
    )
    return np.stack([np.ones(n), counts]) @ columns


def figures(sums: np.ndarray) -> Figures:
    """One row of `tally` as figures."""
    total, has_a, has_b, many_a, many_b, overlap, both, first, gained, common, shift = sums.tolist()
    return Figures(
        queries=round(total),
        coverage_a=_share(100 * has_a, total) or 0.0,
        coverage_b=_share(100 * has_b, total) or 0.0,
        matches_a=_share(many_a, total) or 0.0,
        matches_b=_share(many_b, total) or 0.0,
        overlap=_share(100 * overlap, has_a),
        same_first=_share(100 * first, both),
        gained=round(gained),
        lost=round(has_a - both),
        score_shift=_share(shift, common),
    )


def compare(
    a: Path,
    b: Path,
    logs: list[Path],
    *,
    k: int,
    min_score: float | None,
    by: By | None,
    query_column: str | None,
    encoding: str | None,
    bad_lines: Literal["stop", "skip"],
    threads: int,
) -> Comparison:
    """Match a log's queries with both bundles. Memory does not grow with the log.

    Args:
        a: bundle folder.
        b: another.
        logs: query logs, or folders of them.
        k: most matches a query.
        min_score: leave out phrases with a lesser score.
        by: what tells that two phrases are the same; None: the id, or the text where
            none of a sample of A's ids is in B.
        query_column: see `bidmatch score`; likewise the next two.
        encoding: of text files.
        bad_lines: stop at the first, or skip and count them.
        threads: parts worked on at once.

    Raises:
        ConfigError: the least score is no number.
        InputError: a log is missing, damaged or has a bad line.
        DamagedError: a bundle is not sound.
    """
    if min_score is not None and not math.isfinite(min_score):
        raise ConfigError(f"a least score of {min_score} says nothing", hint="Scores are in -2 to 2.")
    files = find_inputs(logs)
    engines = Engine.load(a), Engine.load(b)
    if by is None:
        # Some rows, evenly spread, tell: all ids of a large bundle would be gigabytes of Python's strings.
        rows = np.unique(np.linspace(0, len(engines[0]) - 1, _SAMPLED).astype(np.int64))
        by = "id" if engines[1].ids.find(engines[0].phrases(rows)["id"].to_pylist()) else "text"
    options = MatchOptions(k, min_score, distinct=by == "text")
    counts, sums = LogCounts(), np.zeros((2, 11))
    with tempfile.TemporaryDirectory(prefix="bidmatch-diff-") as scratch:
        queries = Path(scratch) / "queries.arrow"
        with progress("reading", sum(file.stat().st_size for file in files), "bytes") as step:
            bad = BadLines(skip=bad_lines == "skip")
            chunks = read_log(files, query_column, encoding, bad, step.advance)
            write_distinct(chunks, counts, queries, Path(scratch) / "work")

        def part(_: int, batch: pa.RecordBatch) -> tuple[int, np.ndarray]:
            texts = batch.column("query").to_pylist()
            of_a, of_b = (_answers(engine, texts, options, by) for engine in engines)
            return len(texts), tally(of_a, of_b, batch.column("count").to_numpy())

        with progress("comparing", counts.distinct, "queries") as step:
            for done, more in each_part(queries, None, threads, part):
                sums += more
                step.advance(done)
    models = [engine.bundle.manifest.model.id for engine in engines]
    return Comparison(
        bundle_a=engines[0].bundle_id,
        bundle_b=engines[1].bundle_id,
        scores_comparable=models[0] == models[1],
        by=by,
        k=k,
        rows=counts.rows,
        skipped=bad.count,
        queries=figures(sums[0]),
        traffic=figures(sums[1]),
    )


def _answers(engine: Engine, texts: list[str], options: MatchOptions, by: By) -> Answers:
    owner, column = matches_of(engine, texts, options)
    phrases = engine.phrases(column("rows"))
    names = phrases["id" if by == "id" else "text"].to_pylist()
    if by == "text":
        names = list(map(text.key, names))
    return Answers(owner, names, column("scores").astype(np.float64))


def _ranks(rows: np.ndarray) -> np.ndarray:
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
