"""Rows of the table: trained over the seeds, or made of figures from elsewhere."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson
import torch

from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError
from bidmatch.base.files import atomic_file
from trainer.compare.items import Item
from trainer.compare.memory import Peaks, peaks, reset_peaks
from trainer.compare.records import Figures, Row, Run
from trainer.compare.statistics import spread_figures, spread_of_known
from trainer.data.dataset import Dataset
from trainer.evaluate import served_view
from trainer.run import run_training


def train_rows(
    dataset: Dataset, items: Sequence[Item], seeds: Sequence[int], out: Path, *, overwrite: bool = False
) -> Iterator[Row]:
    """Train each item with each seed; a row is yielded whenever it has one more run.

    Runs lie in `out/<item's folder>/seed-<n>`. A finished one is taken from its report, a stopped one goes
    on. What stops a run, lack of memory and faults of the program included, is recorded as its error.

    Args:
        dataset: with held-out queries.
        items: what to train.
        seeds: of the runs.
        out: the comparison's folder.
        overwrite: delete the runs that are there and begin anew.
    """
    total = len(items) * len(seeds)
    done = 0
    for item in items:
        runs: list[Run] = []
        for seed in seeds:
            done += 1
            say(f"run {done}/{total}: {item.name}, seed {seed}")
            runs.append(_train(dataset, item, seed, out, overwrite))
            yield trained_row(item, runs)


def trained_row(item: Item, runs: list[Run]) -> Row:
    """An item with its runs so far."""
    config = item.config.model_dump(mode="json", exclude={"seed"})
    row = with_runs(Row(name=item.name, kind="trained", given=item.given, config=config), runs)
    return row.model_copy(update={"dim": item.config.dim, "wide_dim": item.config.wide_dim or None})


def measured_row(
    name: str, kind: Literal["ranking", "lexical"], given: str, figures: Figures, seconds: float | None
) -> Row:
    """A row of figures that no run of the trainer gave."""
    return with_runs(
        Row(name=name, kind=kind, given=given), [Run(seconds=seconds, views={"ranking": figures})]
    )


def with_runs(row: Row, runs: list[Run]) -> Row:
    """The row with these runs and the spreads over those of them that have figures."""
    measured = [run for run in runs if run.error is None]
    update: dict[str, Any] = {"runs": runs}
    if measured:
        # Runs of an older version may lack a view.
        views = [view for view in measured[0].views if all(view in run.views for run in measured)]
        update |= {
            "views": {view: spread_figures([run.views[view] for run in measured]) for view in views},
            "served": served_view(dict.fromkeys(views)) if row.kind == "trained" else views[0],
            "seconds": spread_of_known([run.seconds for run in measured]),
            "peak_host_bytes": spread_of_known([run.peak_host_bytes for run in measured]),
            "peak_gpu_bytes": spread_of_known([run.peak_gpu_bytes for run in measured]),
        }
    return row.model_copy(update=update)


def run_of_report(report: dict[str, Any], seed: int, folder: str, reached: Peaks) -> Run:
    """What the comparison takes from a run's report."""
    part = report["test"]
    device = report["device"]
    return Run(
        seed=seed,
        folder=folder,
        model_id=report["model_id"],
        device=f"{device['name']}, {'bf16' if device['bf16'] else 'fp32'}, {device['threads']} threads",
        seconds=sum(record["train_seconds"] for record in report["history"]),
        peak_host_bytes=reached.host,
        peak_gpu_bytes=reached.gpu,
        views={
            view: {
                name: {measure: _number(value) for measure, value in figures.items()}
                for name, figures in {"all": whole, **part["by_frequency"][view]}.items()
            }
            for view, whole in part["metrics"].items()
        },
    )


def _number(value: float | None) -> float:
    """A figure of a report: null, which a report's file has for NaN, is NaN again."""
    return math.nan if value is None else value


def _train(dataset: Dataset, item: Item, seed: int, out: Path, overwrite: bool) -> Run:
    folder = f"{item.folder}/seed-{seed}"
    config = item.config.model_copy(update={"seed": seed})
    finished = (out / folder / "report.json").is_file() and not overwrite
    measurable = reset_peaks()
    try:
        report = run_training(dataset, config, out / folder, overwrite=overwrite)
        return run_of_report(report, seed, folder, _peaks_of(out / folder, report, finished, measurable))
    except BidmatchError as error:
        say(f"{item.name}, seed {seed} failed: {error}")
        return Run(seed=seed, folder=folder, error=str(error))
    except Exception as fault:  # one broken method must not cost a night's other runs
        say(traceback.format_exc().rstrip())
        return Run(seed=seed, folder=folder, error=f"{type(fault).__name__}: {fault}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _peaks_of(run: Path, report: dict[str, Any], finished: bool, measurable: bool) -> Peaks:
    """Peak memory of a run: just measured, or kept beside its folder when it was."""
    kept = run.with_name(f"{run.name}-memory.json")
    if not finished:
        reached = peaks(measurable)
        with atomic_file(kept) as partial:
            values = {"model_id": report["model_id"], "host": reached.host, "gpu": reached.gpu}
            partial.write_bytes(orjson.dumps(values))
        return reached
    try:
        values = orjson.loads(kept.read_bytes())
        same = values["model_id"] == report["model_id"]
        return Peaks(values["host"], values["gpu"]) if same else Peaks(None, None)
    except (OSError, ValueError, KeyError, TypeError):
        return Peaks(None, None)
