"""From measurements to figures: a median over rounds, its quartiles, and whether a target is met."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.serving.rounds import SHARES, Measurement


@dataclass(frozen=True)
class Wanted:
    """What a figure has to reach.

    Attributes:
        figure: its name.
        limit: least value, or the largest.
        at_least: whether `limit` is the least.
        what: in words.
    """

    figure: str
    limit: float
    at_least: bool
    what: str

    def met_by(self, value: float) -> bool:
        """Whether the value reaches it."""
        return value >= self.limit if self.at_least else value <= self.limit


WANTED = (
    Wanted("ceiling_ratio", 0.85, True, "peak of /match over encode + search in a tight loop"),
    Wanted("naive_throughput_ratio", 8, True, "peak over the naive service's"),
    Wanted("naive_p99_ratio", 0.2, False, "p99 over the naive service's, same connections"),
    Wanted("bag_route_ratio", 0.6, True, "`bag`: peak over an empty route's"),
    Wanted("p99_at_70_ratio", 4, False, "p99 at 70% of the peak over the unloaded median"),
    Wanted("overhead_ms", 1, False, "unloaded median above the engine's, ms"),
    Wanted("cache_ratio", 0.6, True, "cache hits over an empty route's"),
)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(middle), float(low), float(high)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Quotients round by round."""
    return [a / b if b else math.inf for a, b in zip(above, below, strict=True)]


def figures_of(found: Measurement) -> dict[str, Any]:
    """All figures in one flat object; `NAME_q1` and `NAME_q3` are the quartiles over the rounds of NAME.

    p99.9 is taken over all rounds' requests together: one round alone has too few.
    """
    rows: dict[str, list[float]] = {}
    for name, loads in found.loads.items():
        if name in ("alone_block", "route"):
            continue
        rows[f"{name}_per_second"] = [met.per_second for met in loads]
        rows[f"{name}_p50_ms"] = [met.p50_ms for met in loads]
        rows[f"{name}_p99_ms"] = [met.p99_ms for met in loads]
        rows[f"{name}_generator_cpus"] = [met.cpu_share for met in loads]
        rows[f"{name}_server_cpus"] = found.numbers[f"{name}_server_cpus"]
    for share in SHARES:
        rows[f"open_{share}_sent_late_p99_ms"] = [
            met.sent_late_p99_ms for met in found.loads[f"open_{share}"]
        ]
    rows["route_per_second"] = [met.per_second for met in found.loads["route"]]
    rows["ceiling_per_second"] = found.numbers["ceiling"]
    for name in ("alone", "engine_alone"):
        rows[f"{name}_p50_ms"] = [float(np.median(block)) for block in found.samples[name]]
        rows[f"{name}_p99_ms"] = [float(np.percentile(block, 99)) for block in found.samples[name]]
    rows |= _ratios(found, rows)
    result: dict[str, Any] = {}
    for name, values in rows.items():
        result[name], result[f"{name}_q1"], result[f"{name}_q3"] = spread(values)
    for share in SHARES:
        pooled = np.concatenate(found.samples[f"open_{share}"])
        result[f"open_{share}_p999_ms"] = float(np.percentile(pooled, 99.9))
        result[f"open_{share}_requests"] = len(pooled)
        result[f"open_{share}_failed"] = sum(met.failed for met in found.loads[f"open_{share}"])
        result[f"open_{share}_waited"] = sum(met.waited for met in found.loads[f"open_{share}"])
    return result


def _ratios(found: Measurement, rows: dict[str, list[float]]) -> dict[str, list[float]]:
    alone, engine = rows["alone_p50_ms"], rows["engine_alone_p50_ms"]
    ours, same = rows["ours_per_second"], rows["ours_same_connections_p99_ms"]
    made = {
        "ceiling_ratio": ratios(ours, rows["ceiling_per_second"]),
        "p99_at_70_ratio": ratios(rows["open_70_p99_ms"], alone),
        "overhead_ms": [a - b for a, b in zip(alone, engine, strict=True)],
        "naive_p99_same_rate_ratio": ratios(rows["ours_same_rate_p99_ms"], rows["naive_same_rate_p99_ms"]),
    }
    for name in ("naive", "infinity"):
        if f"{name}_per_second" in rows:
            made[f"{name}_throughput_ratio"] = ratios(ours, rows[f"{name}_per_second"])
            made[f"{name}_p99_ratio"] = ratios(same, rows[f"{name}_same_connections_p99_ms"])
    for name, ratio in (("bag", "bag_route_ratio"), ("wide", "wide_route_ratio"), ("cached", "cache_ratio")):
        if f"{name}_per_second" in rows:
            made[ratio] = ratios(rows[f"{name}_per_second"], found.numbers[f"{name}_route"])
    return made


def table(result: dict[str, Any], echo: Callable[[str], None]) -> None:
    """The figures for people."""

    def number(name: str, digits: int) -> str:
        if result.get(name) is None:
            return "-"
        return f"{result[name]:,.{digits}f}"

    def middle(name: str, digits: int) -> str:
        low, high = number(f"{name}_q1", digits), number(f"{name}_q3", digits)
        return f"{number(name, digits)} ({low}, {high})"

    rows = [
        ("engine, no HTTP", "ceiling"),
        ("bidmatch", "ours"),
        ("bidmatch, same connections", "ours_same_connections"),
        ("naive", "naive"),
        ("naive, same connections", "naive_same_connections"),
        ("infinity-emb", "infinity"),
        ("infinity-emb, same connections", "infinity_same_connections"),
        ("naive at 70% of its peak", "naive_same_rate"),
        ("bidmatch at that rate", "ours_same_rate"),
        *((f"bidmatch at {share}% of its peak", f"open_{share}") for share in SHARES),
        ("bag", "bag"),
        ("bag, re-scored", "wide"),
        ("cache hits", "cached"),
        ("empty route", "route"),
    ]
    echo(
        f"{'':32} {'answers/s':>24} {'p50, ms':>9} {'p99, ms':>20} {'p99.9, ms':>10} "
        f"{'CPUs: server':>13} {'load':>6}"
    )
    for label, name in rows:
        if f"{name}_per_second" not in result:
            continue
        echo(
            f"{label:32} {middle(f'{name}_per_second', 0):>24} {number(f'{name}_p50_ms', 2):>9} "
            f"{middle(f'{name}_p99_ms', 1) if f'{name}_p99_ms' in result else '-':>20} "
            f"{number(f'{name}_p999_ms', 1):>10} {number(f'{name}_server_cpus', 2):>13} "
            f"{number(f'{name}_generator_cpus', 2):>6}"
        )
    echo(
        f"unloaded, one connection: {number('alone_p50_ms', 2)} ms at the median, the engine alone "
        f"{number('engine_alone_p50_ms', 2)} ms"
    )
    for wanted in WANTED:
        if wanted.figure not in result:
            echo(f"  {wanted.figure:24} not measured: {wanted.what}")
            continue
        sign = "≥" if wanted.at_least else "≤"
        verdict = "" if wanted.met_by(result[wanted.figure]) else "   MISSED"
        limit = f"{sign} {wanted.limit:g}"
        echo(f"  {wanted.figure:24} {middle(wanted.figure, 3):>24} {limit:8} {wanted.what}{verdict}")


def missed(result: dict[str, Any]) -> list[str]:
    """Figures that are not there or do not reach what is wanted."""
    return [
        wanted.figure
        for wanted in WANTED
        if wanted.figure not in result or not wanted.met_by(result[wanted.figure])
    ]
