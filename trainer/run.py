"""A training run from data set to report: prepares the run folder, trains or resumes, evaluates."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import scipy.sparse as sp
import torch
import yaml
from tokenizers import Tokenizer

from bidmatch import __version__
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError, ConfigError, DamagedError, InputError
from bidmatch.base.files import atomic_file, remove_partials
from bidmatch.base.versions import versions_of
from trainer.checkpoint import (
    checkpoints,
    read_interactions,
    read_run_info,
    read_state,
    read_table,
    restore_weights,
    sha256_data,
    write_config,
    write_interactions,
    write_table,
)
from trainer.classifiers.build import make_codes
from trainer.classifiers.pairs import new_classifiers, tables_of
from trainer.config import ProductConfig, TrainConfig, validate_config
from trainer.corpus import TextSource, TokenSource, cached_source, keys_of, shared_source, token_source
from trainer.data.dataset import Dataset, Interactions
from trainer.data.split import split_by_query
from trainer.devices import Device, choose_device
from trainer.distributed import Workers
from trainer.embed import embed
from trainer.encoders.base import Encoder
from trainer.encoders.build import uses_special_tokens
from trainer.encoders.pretrained import load_tokenizer
from trainer.evaluate import metrics_by_frequency, metrics_of, served_view, shared_rankings
from trainer.gandalf.augment import with_label_texts
from trainer.loop import Training, resume, start_table, train
from trainer.metrics import propensities
from trainer.model import DualHeadModel, new_model, normalised
from trainer.plan import CODE_STREAM, GANDALF_STREAM, INIT_STREAM, stream
from trainer.report import read_report, write_report

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "hnswlib", "pyarrow")


def package_versions() -> dict[str, str]:
    """Versions of bidmatch, Python, and the packages that decide what a run comes to."""
    return {"bidmatch": __version__} | versions_of(_PACKAGES)


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
def _locked(run: Path) -> Iterator[None]:
    """Hold the run folder; its lock file also marks it as one, so that no other folder is written into.

    Raises:
        BidmatchError: another process holds it.
        ConfigError: the folder is there and holds something else.
    """
    _check_folder(run)
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as taken:
            raise BidmatchError(f"{run} is being trained by another process") from taken
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
    mine, theirs = config.model_dump(), begun.model_dump()
    free = ("checkpoint_seconds", "keep_checkpoints")
    changed = [name for name in mine if mine[name] != theirs[name] and name not in free]
    if changed:
        fields = ", ".join(f"{name} ({theirs[name]} there, {mine[name]} here)" for name in changed)
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
    return _finished_report(run)


def is_trained(run: Path) -> bool:
    """Whether the run's training is complete, its reports aside.

    Raises:
        DamagedError: a file of the last checkpoint is missing or altered.
    """
    found = checkpoints(run)
    return bool(found) and read_state(found[-1]).finished


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


def _check_data(dataset: Dataset | None, config: TrainConfig) -> None:
    assert dataset is not None
    if len(dataset.train) < 2 or dataset.train.clicks.nnz == 0 or len(dataset.phrases) < 2:
        raise InputError(
            f"too little to learn from: {len(dataset.train)} training queries, "
            f"{len(dataset.phrases)} phrases",
            hint="At least two of each are needed; real quality begins in the thousands.",
        )
    labels, batch = len(dataset.phrases), config.batch
    lengths = config.classifier.lengths if isinstance(config.classifier, ProductConfig) else ()
    if any(length > labels for length in lengths):
        raise ConfigError(
            f"classifier.lengths is {list(lengths)}, and one is more than the {labels:,} labels",
            hint="Their product must be at least the number of labels; none chooses them.",
        )
    if batch.all_labels and labels > batch.all_labels_up_to and config.heads != "dual_encoder":
        # Scores, targets, and the gradients of both, in float32; the table's own rows and their gradient.
        gigabytes = (4 * batch.queries * labels + 2 * labels * config.split_width(config.dim)[1]) * 4 / 1e9
        raise ConfigError(
            f"batch.all_labels scores every query with all {labels:,} labels, and each step would take "
            f"{gigabytes:,.1f} GB; it is for up to {batch.all_labels_up_to:,} labels",
            hint="Leave it off (a pool of labels is scored instead), or raise batch.all_labels_up_to.",
        )


def _sources(
    run: Path, encoder: Encoder, device: Device, texts: dict[str, TokenSource], workers: Workers
) -> dict[str, TextSource]:
    return {
        name: cached_source(encoder, source, run / "cache" / f"{name}.f16", device.device, name, workers)
        for name, source in texts.items()
    }


def run_training(
    dataset: Dataset | None,
    config: TrainConfig,
    run: Path,
    *,
    overwrite: bool = False,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Train on a data set into a run folder, or go on where the folder's run was stopped.

    Of several processes the first one writes; all must see the folder.

    Args:
        dataset: read and split; only the first process needs it, it may be None in others.
        config: the whole configuration, the same in all processes.
        run: the folder; afterwards it holds config.yaml, run.json, data/, checkpoints/, metrics.jsonl,
            report.json and report.html.
        overwrite: delete what another run left in the folder, once this one is sure to start.
        workers: the processes that train together; this one alone by default.

    Returns:
        the report, as in report.json.

    Raises:
        ConfigError: the folder holds a run with other settings or data.
        InputError: the data is too small to train on.
    """
    workers = workers or Workers()
    workers.first(lambda: _check_data(dataset, config))
    device = choose_device(config, workers)
    start = workers.ahead(lambda: _fresh_model(config))
    with ExitStack() as held:

        def prepare() -> dict[str, Any] | None:
            assert dataset is not None
            held.enter_context(_locked(run))
            _prepare(run, config, dataset, overwrite=overwrite)
            return _finished_report(run)

        report = workers.first(prepare) or _train(config, run, device, start, workers)
        if workers.first_of_all:
            # The activations are derived data, and larger than all the rest.
            shutil.rmtree(run / "cache", ignore_errors=True)
        return report


def _prepare(run: Path, config: TrainConfig, dataset: Dataset, *, overwrite: bool) -> None:
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
    for name in ("run.json", "config.yaml", "metrics.jsonl", "report.json", "report.html"):
        (run / name).unlink(missing_ok=True)
    for name in ("checkpoints", "data", "cache"):
        if (run / name).is_dir():
            shutil.rmtree(run / name)


def _fresh_model(config: TrainConfig) -> tuple[Tokenizer, DualHeadModel, dict[str, Any]]:
    """Tokenizer, model and architecture before the first step; the heads depend on the seed alone.

    Raises:
        ConfigError: the pretrained encoder can't be loaded.
    """
    torch.manual_seed(int(stream(config.seed, INIT_STREAM).integers(2**63)))
    tokenizer = load_tokenizer(
        config.encoder.pretrained,
        config.max_tokens,
        special_tokens=uses_special_tokens(config.encoder),
    )
    return tokenizer, *new_model(config)


def _codes(
    config: TrainConfig,
    model: DualHeadModel,
    phrases: TextSource,
    device: Device,
    labels: int,
    workers: Workers,
) -> torch.Tensor | None:
    """Local labels of Multi-Head Encoding, from where the label texts lie before the first step."""
    if config.classifier.kind == "table" or config.heads == "dual_encoder":
        return None
    (vectors,) = embed(model, phrases, device.device, "encoding labels for their codes", workers=workers)
    embeddings = vectors.phi_d if vectors.phi_d.shape[1] else normalised(vectors.phi_c)
    rng = stream(config.seed, CODE_STREAM)
    return workers.first(lambda: make_codes(config.classifier, embeddings, labels, rng))


def _training_set(
    config: TrainConfig, sources: dict[str, TextSource], clicks: sp.csr_matrix
) -> tuple[TextSource, sp.csr_matrix]:
    """Texts of the N training queries and their targets, CSR (N, L) float32; with Gandalf's label texts.

    A pair's click weight decides whether there is the pair, not how much it counts.
    """
    if config.gandalf.enabled:
        rng = stream(config.seed, GANDALF_STREAM)
        return with_label_texts(sources["train"], sources["phrases"], clicks, config.gandalf, rng)
    targets = clicks.astype(np.float32)
    targets.data[:] = 1.0
    return sources["train"], targets


def _filtered(train_part: Interactions, targets: sp.csr_matrix) -> sp.csr_matrix | None:
    """Pairs to leave out of training, of the shape of the targets, whose last rows are not queries."""
    if train_part.filtered is None:
        return None
    filtered = train_part.filtered.copy()
    filtered.resize(targets.shape)
    return filtered


def _finished_report(run: Path) -> dict[str, Any] | None:
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


def _train(
    config: TrainConfig,
    run: Path,
    device: Device,
    start: tuple[Tokenizer, DualHeadModel, dict[str, Any]],
    workers: Workers,
) -> dict[str, Any]:
    tokenizer, model, architecture = start
    say(
        f"device {device.device}, {'bf16' if device.bf16 else 'fp32'}, {device.threads} threads"
        + (f", each of {workers.count} processes" if workers.count > 1 else "")
    )
    workers.check_sees(run / "run.json")
    phrases = read_table(run / "data" / "phrases.arrow")
    parts = {
        name: read_interactions(run / "data" / f"{name}.arrow", len(phrases))
        for name in ("train", "validation", "test")
    }
    model.to(device.device)

    def tokenised(name: str) -> TokenSource:
        def make() -> TokenSource:
            if name == "phrases":
                return token_source(tokenizer, keys_of(phrases), name)
            return token_source(tokenizer, parts[name].queries, f"{name} queries")

        return shared_source(make, run / "cache" / f"{name}.tokens", workers)

    tokens = {name: tokenised(name) for name in (*parts, "phrases")}
    sources = _sources(run, model.encoder, device, tokens, workers)
    found = workers.first(lambda: checkpoints(run))
    codes = None if found else _codes(config, model, sources["phrases"], device, len(phrases), workers)
    classifiers = new_classifiers(config, len(phrases), codes)
    classifiers.to("cpu" if config.table_device == "cpu" else device.device)
    queries, targets = _training_set(config, sources, parts["train"].clicks)
    training = Training(
        config,
        device,
        run,
        model,
        classifiers,
        architecture,
        tokenizer,
        queries,
        sources["phrases"],
        targets,
        workers,
        _filtered(parts["train"], targets),
    )
    # Others train on the validation queries too, so frequencies count them: figures then compare.
    known = sp.vstack([parts["train"].clicks, parts["validation"].clicks])
    counts = np.bincount(known.indices, minlength=len(phrases))
    propensity = propensities(counts, known.shape[0], config.propensity_a, config.propensity_b)

    def measure(name: str) -> dict[str, Any]:
        encode = partial(embed, model, device=device.device, wide=True, workers=workers)
        labels = encode(sources["phrases"], label="encoding labels", classifier=False)
        queries = encode(sources[name], label=f"encoding {name} queries")
        found = shared_rankings(queries, labels, tables_of(classifiers), workers, parts[name].filtered)
        truth = parts[name].clicks
        if not workers.first_of_all:
            return {}
        return {
            "queries": len(parts[name]),
            "metrics": metrics_of(found, truth, propensity),
            "by_frequency": metrics_by_frequency(found, truth, counts, propensity),
        }

    def after_epoch(training: Training) -> dict[str, Any]:
        if not len(parts["validation"]):
            return {}
        measured = measure("validation")
        if not measured:
            return {}
        metrics = measured["metrics"]
        best = metrics[served_view(metrics)]
        loss = training.state.loss_sums["total"] / training.state.step
        say(
            f"epoch {training.state.epoch + 1}/{config.epochs}: loss {loss:.3f}; validation "
            + ", ".join(f"{name} {best[name]:.1f}" for name in ("P@1", "P@5", "PSP@5", "recall@10"))
        )
        return {"validation": metrics}

    if not resume(training) and config.table_from_text and classifiers:
        start_table(training)
    if training.state.finished:
        say(f"{run}: training is finished already; its report is made again")
        restore_weights(workers.first(lambda: checkpoints(run))[-1], model, classifiers)
    else:
        workers.copy([*model.parameters(), *classifiers.parameters()])
        train(training, after_epoch)
    validation = measure("validation") if len(parts["validation"]) else None
    test = measure("test") if len(parts["test"]) else None
    report = {
        "config": config.model_dump(),
        "run": read_run_info(run),
        "model_id": training.state.model_id,
        "device": {
            "name": str(device.device),
            "bf16": device.bf16,
            "threads": device.threads,
            "processes": workers.count,
        },
        "cpu_count": os.cpu_count(),
        "propensity": {"A": config.propensity_a, "B": config.propensity_b},
        "history": training.state.history,
        "validation": validation,
        "test": test,
    }

    def write() -> dict[str, Any]:
        write_report(run, report)
        return report

    return workers.first(write)
