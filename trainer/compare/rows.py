"""Rows of the table: trained over the seeds, or made of figures from elsewhere."""

from __future__ import annotations

import contextlib
import gc
import math
import traceback
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import orjson
import torch

from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError, ConfigError, DamagedError
from bidmatch.base.files import atomic_file
from trainer.compare.items import Item
from trainer.compare.memory import Peaks, peaks, reset_peaks
from trainer.compare.records import Figures, Row, Run
from trainer.compare.statistics import spread_figures, spread_of_known
from trainer.config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.evaluate import served_view
from trainer.run import run_training
from trainer.run_folder import check_run_folder, finished_report, is_trained

# The run of each row and seed, by the row's name.
Runs = dict[tuple[str, int], Run]


def check_rows(dataset: Dataset, items: Sequence[Item], seeds: Sequence[int], out: Path) -> None:
    """Refuse the rows, all together, where a run's folder holds another run or something else.

    Nothing is written. A folder that is damaged is left to its own run, which then says so.

    Raises:
        ConfigError: says what differs in the first such folder, and how many there are.
    """
    refused = []
    for item, seed in product(items, seeds):
        with contextlib.suppress(DamagedError, OSError):
            try:
                check_run_folder(out / run_folder(item, seed), with_seed(item, seed), dataset)
            except ConfigError as differs:
                refused.append(differs)
    if refused:
        further = f" (and {len(refused) - 1} more of the run folders)" if len(refused) > 1 else ""
        raise ConfigError(
            f"{refused[0].reason}{further}",
            hint="Name another --out folder, or the rows apart (NAME=PRESET); --overwrite deletes the runs "
            "of these rows.",
        )


def finished_runs(dataset: Dataset, items: Sequence[Item], seeds: Sequence[int], out: Path) -> Runs:
    """The runs that are complete, from their reports. What can't be read is left to `train_rows`."""
    found: Runs = {}
    for item, seed in product(items, seeds):
        folder = run_folder(item, seed)
        with contextlib.suppress(BidmatchError, OSError):
            report = finished_report(out / folder, with_seed(item, seed), dataset)
            if report is not None:
                kept = _kept_peaks(out / folder, report)
                found[item.name, seed] = run_of_report(report, seed, folder, kept)
    return found


def train_rows(
    dataset: Dataset,
    items: Sequence[Item],
    seeds: Sequence[int],
    out: Path,
    known: Runs,
    *,
    overwrite: bool = False,
) -> Iterator[Runs]:
    """Train each item with each seed; all runs so far are yielded whenever there is one more.

    Runs lie in `out/<item's folder>/seed-<n>`. A stopped one goes on. What stops a run, lack of memory and
    faults of the program included, is recorded as its error.

    Args:
        dataset: with held-out queries.
        items: what to train.
        seeds: of the runs.
        out: the comparison's folder.
        known: the runs that are complete, which are taken as they are.
        overwrite: delete the runs that are there and begin anew.
    """
    total = len(items) * len(seeds)
    runs = dict(known)
    for done, (item, seed) in enumerate(product(items, seeds), 1):
        if (item.name, seed) in known:
            continue
        say(f"run {done}/{total}: {item.name}, seed {seed}")
        runs[item.name, seed] = _train(dataset, item, seed, out, overwrite)
        yield dict(runs)


def trained_rows(items: Sequence[Item], seeds: Sequence[int], runs: Runs) -> list[Row]:
    """A row of each item that has a run, in the order of the items."""
    of_item = {
        item.name: [runs[item.name, seed] for seed in seeds if (item.name, seed) in runs] for item in items
    }
    return [trained_row(item, of_item[item.name]) for item in items if of_item[item.name]]


def run_folder(item: Item, seed: int) -> str:
    """The folder of one run, from the comparison's folder."""
    return f"{item.folder}/seed-{seed}"


def with_seed(item: Item, seed: int) -> TrainConfig:
    """The configuration of one run."""
    return item.config.model_copy(update={"seed": seed})


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
    folder = run_folder(item, seed)
    measurable = reset_peaks()
    try:
        # Of a run whose report is all that is made again, the memory of its training was measured then.
        trained = not overwrite and is_trained(out / folder)
        report = run_training(dataset, with_seed(item, seed), out / folder, overwrite=overwrite)
        reached = _kept_peaks(out / folder, report) if trained else peaks(measurable)
        if not trained:
            _keep_peaks(out / folder, report, reached)
        return run_of_report(report, seed, folder, reached)
    except (BidmatchError, OSError) as error:
        say(f"{item.name}, seed {seed} failed: {error}")
        return Run(seed=seed, folder=folder, error=str(error))
    except Exception as fault:  # one broken method must not cost a night's other runs
        say(traceback.format_exc().rstrip())
        return Run(seed=seed, folder=folder, error=f"{type(fault).__name__}: {fault}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _memory_file(run: Path) -> Path:
    """Where the peak memory of a run is kept, beside its folder."""
    return run.with_name(f"{run.name}-memory.json")


def _keep_peaks(run: Path, report: dict[str, Any], reached: Peaks) -> None:
    values = {"model_id": report["model_id"], "host": reached.host, "gpu": reached.gpu}
    with atomic_file(_memory_file(run)) as partial:
        partial.write_bytes(orjson.dumps(values))


def _kept_peaks(run: Path, report: dict[str, Any]) -> Peaks:
    """Peak memory of a run as it was kept; unknown where it was not, or is another model's."""
    try:
        values = orjson.loads(_memory_file(run).read_bytes())
        same = values["model_id"] == report["model_id"]
        return Peaks(values["host"], values["gpu"]) if same else Peaks(None, None)
    except (OSError, ValueError, KeyError, TypeError):
        return Peaks(None, None)
