"""What a run says of itself: report.json, metrics.jsonl, and report.html with curves and tables."""

from __future__ import annotations

import io
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import orjson
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bidmatch.base.files import atomic_file
from trainer.evaluate import served_view

VIEW_NAMES = {
    "dual_encoder": "Φ_D (dual encoder)",
    "classifier": "Φ_C (classifier)",
    "concatenation": "Φ_D ⊕ N(Φ_C)",
    "rescored": "its best, re-scored wide",
    "wide": "wide heads alone",
}
BIN_NAMES = {
    "head": "head (> 100 training queries)",
    "torso": "torso (10 to 100)",
    "tail": "tail (< 10)",
}
_SUMMARY = ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "nDCG@5", "recall@10", "recall@100")
_CURVES = ("P@1", "P@5", "PSP@5", "recall@10")


def named_views(views: dict[str, Any]) -> dict[str, str]:
    """Titles of the views that were measured, in the order they are shown; the served one says so."""
    best = served_view(views)
    return {
        view: f"{title} (served)" if view == best else title
        for view, title in VIEW_NAMES.items()
        if view in views
    }


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The final figures as lines of a table, for a terminal."""
    part = report["test"] or report["validation"]
    if part is None:
        return ["no queries were held out, so nothing was measured"]
    which = "held-out" if report["test"] else "validation"
    a, b = report["propensity"]["A"], report["propensity"]["B"]
    lines = [f"{part['queries']:,} {which} queries, exact search; propensity A = {a}, B = {b}"]
    lines.append(f"{'':34}" + "".join(f"{name:>11}" for name in _SUMMARY))
    for view, title in named_views(part["metrics"]).items():
        row = part["metrics"][view]
        lines.append(f"{title:34}" + "".join(f"{row[name]:11.1f}" for name in _SUMMARY))
    return lines


def read_report(run: Path, model_id: str) -> dict[str, Any] | None:
    """The report that `write_report` left in a run folder; None where it is not whole or of another model.

    Args:
        run: the folder.
        model_id: of the trained model.
    """
    if not all((run / name).is_file() for name in ("report.html", "metrics.jsonl")):
        return None
    try:
        report = orjson.loads((run / "report.json").read_bytes())
    except (OSError, ValueError):
        return None
    # The file is written whole: one that can be read and names the model is what was written of it.
    return report if isinstance(report, dict) and report.get("model_id") == model_id else None


def _chart(title: str, series: dict[str, list[float]], y_label: str) -> str:
    """Line chart over the epochs as inline SVG; each series has one value an epoch."""
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "bidmatch"
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, values in series.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=name)
    axes.set(title=title, xlabel="epoch", ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _charts(history: list[dict[str, Any]]) -> list[str]:
    if not history:
        return []
    names = {"total": "L", "dual_encoder": "L_D", "classifier": "L_C", "served": "L_served", "wide": "L_wide"}
    losses = {
        title: [record["loss"][name] for record in history]
        for name, title in names.items()
        if name in history[0]["loss"]
    }
    charts = [_chart("Loss", losses, "mean over the epoch")]
    if "cosine" in history[0]:
        cosines = {part: [record["cosine"][part] for record in history] for part in history[0]["cosine"]}
        charts.append(_chart("Cosine with the teacher", cosines, "mean"))
    measured = [record["validation"] for record in history if "validation" in record]
    if measured:
        for metric in _CURVES:
            series = {
                title: [views[view][metric] for views in measured]
                for view, title in named_views(measured[0]).items()
            }
            charts.append(_chart(f"{metric}, validation queries", series, "percent"))
    return charts


def write_report(run: Path, report: dict[str, Any]) -> None:
    """Write report.json, metrics.jsonl (one line an epoch) and report.html into the run folder.

    Args:
        run: the folder.
        report: configuration, provenance, history and final metrics, as `run_training` returns them.
    """
    with atomic_file(run / "report.json") as partial:
        partial.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    with atomic_file(run / "metrics.jsonl") as partial:
        partial.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in report["history"]))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(
        (files("trainer") / "templates" / "report.html").read_text(encoding="utf-8")
    )
    html = page.render(
        report=report,
        charts=_charts(report["history"]),
        view_names=named_views(
            (report["test"] or report["validation"] or {"metrics": {"concatenation": 0}})["metrics"]
        ),
        bin_names=BIN_NAMES,
        config=yaml.safe_dump(report["config"], sort_keys=False),
    )
    with atomic_file(run / "report.html") as partial:
        partial.write_text(html, encoding="utf-8")
