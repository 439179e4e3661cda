"""A run's folder: what it is begun with, whether a run can go on in it, and whether it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import yaml

from bidmatch import __version__
from bidmatch.base.console import say
from bidmatch.base.errors import ConfigError, DamagedError
from bidmatch.base.files import atomic_file, locked, remove_partials
from bidmatch.base.versions import versions_of
from trainer.checkpoint import (
    checkpoints,
    read_run_info,
    read_state,
    sha256_data,
    write_config,
    write_interactions,
    write_table,
)
from trainer.config import TrainConfig
from trainer.data.dataset import Dataset, Interactions
from trainer.data.split import split_by_query
from trainer.report import read_report
from trainer.settings import flat_settings, validate_config

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "hnswlib", "pyarrow")


def package_versions() -> dict[str, str]:
    """Versions of bidmatch, Python, and the packages that decide what a run comes to."""
    return {"bidmatch": __version__} | versions_of(_PACKAGES)


_FILES = ("run.json", "config.yaml", "metrics.jsonl", "report.json", "report.html")
_FOLDERS = ("checkpoints", "data", "cache")


def holds_only_a_run(folder: Path) -> bool:
    """Whether a folder holds what a run wrote, and nothing else, so that it can be replaced as a whole."""
    names = {entry.name for entry in folder.iterdir()}
    return {"run.json", "config.yaml"} <= names <= {*_FILES, *_FOLDERS, ".lock"}


def _check_folder(run: Path) -> None:
    """Refuse a folder that is there and no run's.

    Raises:
        ConfigError: it is a file, or holds something else.
    """
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is a file, not a run folder", hint="Name a new folder.")
    if run.is_dir() and any(run.iterdir()) and not (run / ".lock").is_file():
        raise ConfigError(
            f"{run} holds files of something else, which a run would mix with", hint="Name a new folder."
        )


@contextmanager
def locked_run(run: Path) -> Iterator[None]:
    """Hold the run folder; its lock file also marks it as one, so that no other folder is written into.

    Raises:
        BidmatchError: another process holds it.
        ConfigError: the folder is there and holds something else.
    """
    _check_folder(run)
    run.mkdir(parents=True, exist_ok=True)
    with locked(run / ".lock", f"{run} is being trained by another process"):
        yield


def split_validation(train_part: Interactions, config: TrainConfig) -> tuple[Interactions, Interactions]:
    """Training and validation queries; the latter a share of the former, capped, chosen by query hash."""
    share = config.validation_share
    if len(train_part):
        share = min(share, config.validation_max / len(train_part))
    return split_by_query(train_part, share, config.seed)


def check_run_folder(run: Path, config: TrainConfig, dataset: Dataset) -> None:
    """Refuse a folder in which a run with this configuration on this data cannot begin or go on.

    It reads what the run was begun with and nothing large, so that many folders can be asked before any work.

    Raises:
        ConfigError: it is no run's, or configuration or data differ from what the run was begun with.
        DamagedError: what the run was begun with can't be read.
    """
    _check_folder(run)
    if not (run / "run.json").exists():
        return
    file = run / "config.yaml"
    try:
        begun = validate_config(yaml.safe_load(file.read_text(encoding="utf-8")), str(file))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as wrong:
        raise DamagedError(f"{run} holds files of no run that can be resumed: {wrong}") from wrong
    hint = "Use the same data and settings to resume, or another --out folder, or --overwrite."
    mine, theirs = flat_settings(config), flat_settings(begun)
    free = ("checkpoint_seconds", "keep_checkpoints")
    names = [name for name in dict.fromkeys([*mine, *theirs]) if name not in free]
    absent = "none"
    changed = {
        name: (theirs.get(name, absent), mine.get(name, absent))
        for name in names
        if theirs.get(name, absent) != mine.get(name, absent)
    }
    if changed:
        fields = ", ".join(f"{name} ({there} there, {here} here)" for name, (there, here) in changed.items())
        raise ConfigError(f"{run} holds a run with other settings: {fields}", hint=hint)
    try:
        info = orjson.loads((run / "run.json").read_bytes())
        fingerprint, split = info["data"]["fingerprint"], info["split"]
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise DamagedError(
            f"{run / 'run.json'} is missing or damaged",
            hint="Train again with --overwrite, or restore the file.",
        ) from wrong
    if fingerprint != dataset.report.fingerprint or split != dataset.split.model_dump():
        raise ConfigError(f"{run} holds a run on other data (fingerprint or split differs)", hint=hint)


def prepare_folder(run: Path, config: TrainConfig, dataset: Dataset, *, overwrite: bool) -> None:
    """Bring the run folder to where training begins or goes on."""
    if overwrite:
        _delete_run(run)
    for stale in (run / "run.json", run / "config.yaml", *(run / "data").glob("*.arrow")):
        remove_partials(stale)
    if (run / "run.json").exists():
        check_run_folder(run, config, dataset)
        read_run_info(run)
    else:
        _begin(run, config, dataset)


def _delete_run(run: Path) -> None:
    """Delete what a run wrote, and nothing else."""
    for name in _FILES:
        (run / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        if (run / name).is_dir():
            shutil.rmtree(run / name)


def _begin(run: Path, config: TrainConfig, dataset: Dataset) -> None:
    """Write what a run is made from: data, configuration, provenance. `run.json` last: it marks it whole."""
    train_part, validation = split_validation(dataset.train, config)
    counts = np.bincount(train_part.clicks.indices, minlength=len(dataset.phrases)).astype(np.int32)
    phrases = dataset.phrases
    if "train_clicks" in phrases.column_names:
        phrases = phrases.drop_columns(["train_clicks"])
    data = run / "data"
    data.mkdir(exist_ok=True)
    write_table(data / "phrases.arrow", phrases.append_column("train_clicks", pa.array(counts)))
    write_interactions(data / "train.arrow", train_part)
    write_interactions(data / "validation.arrow", validation)
    write_interactions(data / "test.arrow", dataset.test)
    with atomic_file(run / "config.yaml") as partial:
        write_config(partial, config)
    info = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": config.seed,
        "versions": package_versions(),
        "data": {
            "fingerprint": dataset.report.fingerprint,
            "read": dataset.report.model_dump(),
        },
        "split": dataset.split.model_dump(),
        "sha256": sha256_data(run),
        "counts": {
            "phrases": len(phrases),
            "train_queries": len(train_part),
            "validation_queries": len(validation),
            "test_queries": len(dataset.test),
            "train_pairs": int(train_part.clicks.nnz),
        },
    }
    with atomic_file(run / "run.json") as partial:
        partial.write_bytes(orjson.dumps(info, option=orjson.OPT_INDENT_2))


def finished_report(run: Path, config: TrainConfig, dataset: Dataset) -> dict[str, Any] | None:
    """The report of a run that is complete, reports included; else None.

    All that `run_training` would do with such a run, which makes a model first.

    Raises:
        ConfigError: the folder holds another run, see `check_run_folder`.
        DamagedError: a file of the run is missing or altered.
    """
    if not (run / "run.json").exists():
        return None
    check_run_folder(run, config, dataset)
    read_run_info(run)
    return report_of_finished(run)


def report_of_finished(run: Path) -> dict[str, Any] | None:
    """The report of a run that is complete, reports included; else None."""
    found = checkpoints(run)
    if not found or not (state := read_state(found[-1])).finished:
        return None
    report = read_report(run, state.model_id)
    if report is not None:
        say(f"{run}: training is finished already")
    elif "teacher" in read_run_info(run):
        raise DamagedError(
            f"{run} holds a student of `bidmatch distill`, and its report is missing or damaged",
            hint="Run `bidmatch distill` again with --overwrite.",
        )
    return report


def is_trained(run: Path) -> bool:
    """Whether the run's training is complete, its reports aside.

    Raises:
        DamagedError: a file of the last checkpoint is missing or altered.
    """
    found = checkpoints(run)
    return bool(found) and read_state(found[-1]).finished
