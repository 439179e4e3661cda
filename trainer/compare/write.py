"""compare.json and compare.html."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import orjson

from bidmatch.base.files import atomic_file
from trainer.compare.charts import charts
from trainer.compare.records import Comparison, Row, Spread
from trainer.compare.statistics import COMPARED
from trainer.report import BIN_NAMES, VIEW_NAMES

COLUMNS: tuple[str, ...] = (
    "P@1",
    "P@3",
    "P@5",
    "PSP@1",
    "PSP@3",
    "PSP@5",
    "nDCG@5",
    "recall@10",
    "recall@100",
)
PARTS = {"all": "All phrases", **BIN_NAMES}
# Settings that say where and how fast a run is made, not what it is.
_ASIDE = ("threads", "checkpoint_seconds", "keep_checkpoints")


def write_json(out: Path, comparison: Comparison) -> None:
    """Write `out/compare.json`; NaN becomes null."""
    with atomic_file(out / "compare.json") as partial:
        partial.write_bytes(orjson.dumps(comparison.model_dump(), option=orjson.OPT_INDENT_2))


def write_html(out: Path, comparison: Comparison) -> None:
    """Write `out/compare.html`: one file, read offline."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"spread": spread_text, "seconds": seconds_text, "signed": _signed, "size": _size}
    page = environment.from_string(
        (files("trainer") / "templates" / "compare.html").read_text(encoding="utf-8")
    )
    rows = comparison.rows
    names, settings = differing_settings(rows)
    html = page.render(
        comparison=comparison,
        columns=COLUMNS,
        compared=COMPARED,
        parts=PARTS,
        view_names=VIEW_NAMES,
        best={part: best_of(rows, part) for part in PARTS},
        best_views={part: {row.name: best_views(row, part) for row in rows} for part in PARTS},
        charts=charts(rows),
        setting_names=names,
        settings=settings,
        validation_shares=sorted({row.config["validation_share"] for row in rows if row.config}),
    )
    with atomic_file(out / "compare.html") as partial:
        partial.write_text(html, encoding="utf-8")


def spread_text(spread: Spread | None, digits: int = 1) -> str:
    """`44.7 ± 0.3`, `44.7` for one run, `–` for nothing."""
    if spread is None or math.isnan(spread.mean):
        return "–"
    mean = f"{spread.mean:,.{digits}f}"
    return mean if spread.sd is None else f"{mean} ± {spread.sd:,.{digits}f}"


def best_of(rows: Sequence[Row], part: str) -> dict[str, list[str]]:
    """Measure -> names of the rows whose served view is best in a bin; without rivals none is."""
    return {measure: _highest({row.name: row.figure(measure, part) for row in rows}) for measure in COLUMNS}


def best_views(row: Row, part: str) -> dict[str, list[str]]:
    """Measure -> the views that are best within one row; without rivals none is."""
    return {
        measure: _highest({view: figures[part].get(measure) for view, figures in row.views.items()})
        for measure in COLUMNS
    }


def _highest(spreads: dict[str, Spread | None]) -> list[str]:
    means = {name: one.mean for name, one in spreads.items() if one is not None and not math.isnan(one.mean)}
    return [name for name, mean in means.items() if mean == max(means.values())] if len(means) > 1 else []


def seconds_text(spread: Spread | None) -> str:
    """`3.2 ± 0.1` below a hundred seconds, else whole ones."""
    return spread_text(spread, 1 if spread is not None and spread.mean < 100 else 0)


def differing_settings(rows: Sequence[Row]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Names of the settings in which trained rows differ, and each row's values of them."""
    flat = {row.name: _flat(row.config) for row in rows if row.config is not None}
    every = dict.fromkeys(name for values in flat.values() for name in values)
    names = [
        name
        for name in every
        if name not in _ASIDE and len({repr(values.get(name)) for values in flat.values()}) > 1
    ]
    return names, {row: {name: values.get(name, "–") for name in names} for row, values in flat.items()}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.1f}".replace("-", "−")


def _size(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.mean / 1e9:.2f} GB"
