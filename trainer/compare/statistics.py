"""Means and spreads over the seeds, and which differences are more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import stats

from trainer.compare.records import Difference, Differences, Figures, Row, Spread

COMPARED = ("P@1", "P@5", "PSP@5", "recall@10")
_CONFIDENCE = 0.95


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation (n - 1 in the denominator) of at least one value."""
    array = np.asarray(values, dtype=np.float64)
    sd = float(array.std(ddof=1)) if len(array) > 1 else None
    return Spread(mean=float(array.mean()), sd=sd, n=len(array))


def spread_of_known(values: Sequence[float | None]) -> Spread | None:
    """The spread of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def spread_figures(runs: Sequence[Figures]) -> dict[str, dict[str, Spread]]:
    """Each figure's spread over runs that all have the same bins and measures."""
    return {
        part: {measure: spread([run[part][measure] for run in runs]) for measure in figures}
        for part, figures in runs[0].items()
    }


def query_error(p_at_1: float, queries: int) -> float:
    """Standard error of P@1 over n queries, all in percent: √(p (1 - p) / n), as a query is right or wrong.

    NaN for no queries.
    """
    share = p_at_1 / 100
    return 100 * math.sqrt(max(share * (1 - share), 0.0) / queries) if queries else math.nan


def half_width(values: np.ndarray) -> float | None:
    """Half the 95% interval (Student's t) of the mean of n values; None for n < 2."""
    n = len(values)
    if n < 2:
        return None
    quantile = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, n - 1))
    return quantile * float(values.std(ddof=1)) / math.sqrt(n)


def difference(
    mine: dict[int | None, float], theirs: dict[int | None, float], queries: int | None
) -> Difference | None:
    """`mine` minus `theirs`, figures of two rows or views in percent by seed, paired by seed.

    What has no seed (another system's ranking, under None) is held against every run of the other. The
    standard error over queries is √(e_a² + e_b²) of the two P@1: the same queries are asked of both, so their
    errors go together and the true one is smaller.

    Args:
        mine: seed -> percent.
        theirs: likewise.
        queries: number of queries measured, where the figures are P@1; None for other measures.

    Returns:
        None where the two have no seed in common.
    """
    if None in mine and None not in theirs:
        mine = dict.fromkeys(theirs, mine[None])
    elif None in theirs and None not in mine:
        theirs = dict.fromkeys(mine, theirs[None])
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        return None
    values = np.array([mine[seed] - theirs[seed] for seed in seeds])
    mean, width = float(values.mean()), half_width(values)
    error = None
    if queries is not None:
        means = [float(np.mean([figures[seed] for seed in seeds])) for figures in (mine, theirs)]
        error = math.hypot(*(query_error(value, queries) for value in means))
    noise = [value for value in (width, error) if value is not None]
    within = abs(mean) <= max(noise) if noise else None
    return Difference(mean=mean, half_width=width, query_error=error, within_noise=within)


def all_differences(rows: Sequence[Row], queries: int) -> list[Differences]:
    """Differences from the first row that has figures, and from the one with the highest P@1."""
    measured = [row for row in rows if row.served is not None]
    if len(measured) < 2:
        return []
    best = max(measured, key=_p_at_1)
    references: list[tuple[Row, Literal["first", "best"]]] = [(measured[0], "first")]
    if best is not measured[0]:
        references.append((best, "best"))
    out = []
    for reference, why in references:
        differences = {
            row.name: _compared((row, row.served), (reference, reference.served), queries)
            for row in measured
            if row is not reference
        }
        out.append(Differences(reference=reference.name, why=why, rows=differences))
    return out


def view_differences(rows: Sequence[Row], queries: int) -> dict[str, dict[str, dict[str, Difference]]]:
    """Row -> view -> measure: how each other view of a row differs from the served one."""
    return {
        row.name: {
            view: _compared((row, view), (row, row.served), queries)
            for view in row.views
            if view != row.served
        }
        for row in rows
        if len(row.views) > 1
    }


def _compared(
    mine: tuple[Row, str | None], theirs: tuple[Row, str | None], queries: int
) -> dict[str, Difference]:
    """Differences of one row's view from another's, in each of COMPARED that can be told."""
    found = {
        measure: difference(
            _by_seed(*mine, measure), _by_seed(*theirs, measure), queries if measure == "P@1" else None
        )
        for measure in COMPARED
    }
    return {measure: one for measure, one in found.items() if one is not None}


def _p_at_1(row: Row) -> float:
    found = row.figure("P@1")
    return -math.inf if found is None or math.isnan(found.mean) else found.mean


def _by_seed(row: Row, view: str | None, measure: str) -> dict[int | None, float]:
    assert view is not None
    return {run.seed: run.views[view]["all"][measure] for run in row.runs if run.error is None}
