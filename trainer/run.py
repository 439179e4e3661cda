"""A training run from data set to report: prepares the run folder, trains or resumes, evaluates."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer

from bidmatch.base.console import say
from bidmatch.base.errors import ConfigError, InputError
from trainer.checkpoint import (
    checkpoints,
    read_interactions,
    read_run_info,
    read_table,
    restore_weights,
)
from trainer.classifiers.build import make_codes
from trainer.classifiers.pairs import new_classifiers, tables_of
from trainer.config import ProductConfig, TrainConfig
from trainer.corpus import TextSource, TokenSource, cached_source, keys_of, shared_source, token_source
from trainer.data.dataset import Dataset, Interactions
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
from trainer.report import write_report
from trainer.run_folder import locked_run, prepare_folder, report_of_finished


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
        memory = f"{gigabytes:,.1f} GB" if gigabytes >= 1 else f"{1e3 * gigabytes:,.1f} MB"
        raise ConfigError(
            f"batch.all_labels scores every query with all {labels:,} labels, and each step would take "
            f"{memory}; it is for up to {batch.all_labels_up_to:,} labels",
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
            held.enter_context(locked_run(run))
            prepare_folder(run, config, dataset, overwrite=overwrite)
            return report_of_finished(run)

        report = workers.first(prepare) or _train(config, run, device, start, workers)
        if workers.first_of_all:
            # The activations are derived data, and larger than all the rest.
            shutil.rmtree(run / "cache", ignore_errors=True)
        return report


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


def few_positives(clicks: sp.csr_matrix, drawn: int) -> str | None:
    """What to say where steps see a small part of the log: far fewer positives drawn than queries have.

    Args:
        clicks: CSR (N, L), of the training queries.
        drawn: β, positives sampled a query.
    """
    mean = clicks.nnz / max(1, clicks.shape[0])
    if mean <= 3 * drawn:
        return None
    return (
        f"queries have {mean:.1f} phrases each and a step draws {drawn}: a larger batch.positives takes "
        "longer an epoch and can learn far more from it (bench/compare.md)"
    )


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
    if hint := few_positives(parts["train"].clicks, config.batch.positives):
        say(hint)
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
