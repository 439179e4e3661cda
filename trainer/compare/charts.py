"""Plots of a comparison, as inline SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.compare.records import Row, Spread

_BINS = ("head", "torso", "tail")
_BINNED = ("P@5", "PSP@5", "recall@10")
_BY_COST = ("P@1", "recall@10")
_LONGEST_LEGEND = 44
_MARKERS = "os^Dv"


def charts(rows: Sequence[Row]) -> list[str]:
    """All plots of the rows that have figures, each row's served view.

    Bars by head, torso and tail; P@5 against PSP@5; quality against training time. Error bars are one
    standard deviation over the seeds.
    """
    shown = [row for row in rows if row.served is not None]
    if not shown:
        return []
    out = [_bars(shown, measure) for measure in _BINNED if _has_bins(shown, measure)]
    out.append(
        _points(
            shown,
            lambda row: row.figure("P@5"),
            lambda row: row.figure("PSP@5"),
            "P@5 against PSP@5",
            ("P@5, percent", "PSP@5, percent"),
        )
    )
    timed = [row for row in shown if row.seconds is not None and row.seconds.mean > 0]
    for measure in _BY_COST if timed else ():
        out.append(
            _points(
                timed,
                lambda row: row.seconds,
                lambda row, measure=measure: row.figure(measure),  # type: ignore[misc]
                f"Cost against {measure}",
                ("seconds to train", f"{measure}, percent"),
                colours=[shown.index(row) for row in timed],
                log_x=True,
            )
        )
    return out


def _has_bins(rows: Sequence[Row], measure: str) -> bool:
    found = [row.figure(measure, part) for row in rows for part in _BINS]
    return any(spread is not None and math.isfinite(spread.mean) for spread in found)


def _bars(rows: Sequence[Row], measure: str) -> str:
    figure, axes = _figure(max(5.2, 2.5 + 0.33 * len(rows)), len(rows))
    width = 0.84 / len(rows)
    handles = []
    for at, row in enumerate(rows):
        spreads = [row.figure(measure, part) for part in _BINS]
        means = [math.nan if spread is None else spread.mean for spread in spreads]
        errors = [0.0 if spread is None else spread.sd or 0.0 for spread in spreads]
        places = np.arange(len(_BINS)) + (at - (len(rows) - 1) / 2) * width
        handles.append(
            axes.bar(
                places, means, width * 0.92, yerr=errors, color=_colour(at), error_kw={"elinewidth": 0.8}
            )
        )
    axes.set_xticks(range(len(_BINS)), _BINS)
    axes.set_xlim(-0.5, len(_BINS) - 0.5)
    axes.set(title=f"{measure} by head, torso and tail", ylabel="percent")
    axes.grid(alpha=0.3, axis="y")
    return _svg(figure, handles, rows)


def _points(
    rows: Sequence[Row],
    x_of: Callable[[Row], Spread | None],
    y_of: Callable[[Row], Spread | None],
    title: str,
    names: tuple[str, str],
    *,
    colours: Sequence[int] | None = None,
    log_x: bool = False,
) -> str:
    figure, axes = _figure(5.2, len(rows))
    handles = []
    for at, row in zip(colours or range(len(rows)), rows, strict=True):
        x, y = x_of(row) or Spread(mean=math.nan), y_of(row) or Spread(mean=math.nan)
        handles.append(
            axes.errorbar(
                [x.mean],
                [y.mean],
                xerr=[x.sd or 0.0],
                yerr=[y.sd or 0.0],
                fmt=_MARKERS[at % len(_MARKERS)],
                color=_colour(at),
                markersize=5,
                elinewidth=0.8,
            )
        )
    if log_x:
        axes.set_xscale("log")
    axes.set(title=title, xlabel=names[0], ylabel=names[1])
    axes.grid(alpha=0.3, which="both" if log_x else "major")
    return _svg(figure, handles, rows)


def _figure(width: float, rows: int) -> tuple[Figure, Axes]:
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "bidmatch"
    figure = Figure(figsize=(width, max(3.6, 0.6 + 0.19 * rows)), layout="constrained")
    return figure, figure.subplots()


def _colour(row: int) -> tuple[float, float, float, float]:
    colour: tuple[float, float, float, float] = matplotlib.colormaps["tab20"](row % 20)
    return colour


def _svg(figure: Figure, handles: Sequence[Any], rows: Sequence[Row]) -> str:
    legend = figure.legend(
        handles, [_short(row.name) for row in rows], loc="outside right upper", frameon=False, fontsize=8
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LEGEND else name[: _LONGEST_LEGEND - 1] + "…"
