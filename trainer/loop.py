"""The training loop: Algorithm 1 of UniDEC, epoch by epoch, resumable at any step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch
from tokenizers import Tokenizer
from torch import nn

from bidmatch.base.console import progress, say
from bidmatch.base.errors import BidmatchError
from trainer.checkpoint import CheckpointState, checkpoints, read_state, restore_training, save_checkpoint
from trainer.classifiers.pairs import classifier_at, tables_of
from trainer.clustering import epoch_batches
from trainer.config import TrainConfig
from trainer.corpus import TextSource
from trainer.devices import Device
from trainer.distributed import Workers
from trainer.embed import embed
from trainer.model import DualHeadModel, normalised
from trainer.optimise import make_optimisers, sparse_parameters
from trainer.plan import EPOCH_STREAM, Plan, make_plan, stream
from trainer.row_adam import RowAdam
from trainer.step import train_step

EpochMetrics = Callable[["Training"], dict[str, Any]]


@dataclass
class Training:
    """Everything a step reads or changes.

    Attributes:
        config: the whole configuration.
        device: where it computes.
        run: the run folder.
        model: Φ and its heads.
        classifiers: Ψ of each pair of heads, `narrow` and maybe `wide`; empty where the classifier is off.
        architecture: what `empty_model` rebuilds the encoder from.
        tokenizer: the encoder's.
        queries: texts of the N training queries.
        labels: texts of the L labels.
        targets: CSR (N, L) float32, how much each label belongs to each training query: 1 for a pair of the
            log.
        workers: the processes that train together.
        filtered: CSR bool (N, L) of pairs that are neither positive nor negative; None for none.
        optimisers: AdamW over the dense parameters, RowAdam over the tables, where there are such.
        dense_parameters: those of AdamW.
        encoded_dense: those of Φ and its heads with dense gradients, which sum over the processes.
        encoded_sparse: likewise, with sparse gradients.
        state: where the run stands.
        plan: clusters and hard negatives in force, or None before the first.
    """

    config: TrainConfig
    device: Device
    run: Path
    model: DualHeadModel
    classifiers: nn.ModuleDict
    architecture: dict[str, Any]
    tokenizer: Tokenizer
    queries: TextSource
    labels: TextSource
    targets: sp.csr_matrix
    workers: Workers = field(default_factory=Workers)
    filtered: sp.csr_matrix | None = None
    optimisers: tuple[torch.optim.Optimizer, ...] = field(init=False)
    dense_parameters: list[nn.Parameter] = field(init=False)
    encoded_dense: list[nn.Parameter] = field(init=False)
    encoded_sparse: list[nn.Parameter] = field(init=False)
    state: CheckpointState = field(default_factory=CheckpointState)
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self.optimisers = make_optimisers(self.model, self.classifiers, self.config.optimiser)
        self.dense_parameters = [
            parameter
            for optimiser in self.optimisers
            if not isinstance(optimiser, RowAdam)
            for group in optimiser.param_groups
            for parameter in group["params"]
        ]
        sparse = sparse_parameters(self.model)
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.encoded_dense = [value for name, value in trained.items() if name not in sparse]
        self.encoded_sparse = [value for name, value in trained.items() if name in sparse]

    @property
    def steps_an_epoch(self) -> int:
        """Batches that hold every training query once."""
        return max(1, -(-self.targets.shape[0] // self.config.batch.queries))

    @property
    def table_device(self) -> torch.device:
        """Where Ψ lies."""
        return torch.device("cpu") if self.config.table_device == "cpu" else self.device.device

    def save(self) -> None:
        """Write a checkpoint of this moment, from the first process alone."""
        if self.workers.rank == 0:
            save_checkpoint(
                self.run,
                self.state,
                self.config,
                self.architecture,
                self.tokenizer,
                self.model,
                self.classifiers,
                self.optimisers,
                self.plan,
            )


def start_table(training: Training) -> None:
    """Ψ_l = g2(Φ(z_l)): the classifier begins where the label texts are (`table_from_text`)."""
    pairs = embed(
        training.model,
        training.labels,
        training.device.device,
        "starting Ψ from label texts",
        wide=True,
        keep_on=training.table_device,
        workers=training.workers,
    )
    for level, vectors in enumerate(pairs):
        classifier_at(training.classifiers, level).start_from(vectors.phi_c)


def resume(training: Training) -> bool:
    """Take up the last whole checkpoint, if there is one; says so. False where there is none.

    Raises:
        DamagedError: the checkpoint was altered.
    """
    found = training.workers.first(lambda: checkpoints(training.run))
    if not found:
        return False
    training.state = training.workers.first(lambda: read_state(found[-1]))
    if not training.state.finished:
        training.plan = restore_training(found[-1], training.model, training.classifiers, training.optimisers)
        say(
            f"resuming at epoch {training.state.epoch + 1}, step {training.state.step + 1} ({found[-1].name})"
        )
    return True


def _refresh(training: Training) -> None:
    config, device = training.config, training.device.device
    # HNSW searches in host memory; so many labels may not even fit the GPU's.
    exact = training.targets.shape[1] <= config.batch.exact_mining_up_to
    place = device if exact else torch.device("cpu")
    vectors = partial(
        embed,
        training.model,
        device=device,
        classifier=config.heads == "classifier",
        bf16=training.device.bf16,
        keep_on=place,
        workers=training.workers,
    )
    (queries,) = vectors(training.queries, label="encoding queries")
    if config.heads == "classifier":
        table = tables_of(training.classifiers)[0]
        query_vectors, label_vectors = normalised(queries.phi_c), normalised(table)
    else:
        (labels,) = vectors(training.labels, label="encoding labels")
        query_vectors, label_vectors = queries.phi_d, labels.phi_d
    no_negatives = training.targets
    if training.filtered is not None:
        no_negatives = sp.csr_matrix(no_negatives + training.filtered)
    training.plan = make_plan(
        query_vectors,
        label_vectors.to(place),
        no_negatives,
        config.batch,
        config.seed,
        training.state.epoch,
        training.device.threads,
        training.workers,
    )


def _diverged(config: TrainConfig, what: str, epoch: int, step: int) -> BidmatchError:
    rates = ", ".join(
        f"optimiser.{name} {getattr(config.optimiser, name):g}"
        for name in ("encoder_lr", "heads_lr", "table_lr")
    )
    loss = config.loss
    return BidmatchError(
        f"training does not converge: {what} in epoch {epoch + 1}, step {step + 1}",
        hint=f"Lower the learning rates ({rates}) or raise the temperatures (loss.temperature "
        f"{loss.temperature:g}, loss.classifier_temperature {loss.classifier_temperature:g}), and begin anew "
        "in another folder or with --overwrite.",
    )


def _all_finite(module: nn.Module) -> bool:
    # A sum needs no memory of the size of Ψ, and is finite only where all its terms are.
    sums = (float(parameter.detach().sum(dtype=torch.float64)) for parameter in module.parameters())
    return all(map(math.isfinite, sums))


def _run_epoch(training: Training, saved_at: float) -> float:
    config, state = training.config, training.state
    if state.step == 0 and state.epoch % config.batch.refresh == 0:
        _refresh(training)
    assert training.plan is not None
    order = stream(config.seed, EPOCH_STREAM, state.epoch)
    batches = epoch_batches(training.plan.clusters, config.batch.queries, order)
    training.model.train()
    with progress(f"epoch {state.epoch + 1}/{config.epochs}", training.targets.shape[0], "queries") as bar:
        bar.advance(sum(len(rows) for rows in batches[: state.step]))
        for rows in batches[state.step :]:
            losses = train_step(training, rows)
            if not math.isfinite(losses["total"]):
                raise _diverged(config, f"the loss is {losses['total']}", state.epoch, state.step)
            for name, value in losses.items():
                state.loss_sums[name] = state.loss_sums.get(name, 0.0) + value
            state.step += 1
            state.global_step += 1
            bar.advance(len(rows), note=f"loss {losses['total']:.3f}")
            if time.monotonic() - saved_at >= config.checkpoint_seconds and state.step < len(batches):
                training.save()
                saved_at = time.monotonic()
    return saved_at


def train(training: Training, epoch_metrics: EpochMetrics) -> None:
    """Run from where `training.state` stands to the end; the last checkpoint is marked finished.

    Args:
        training: fresh, or brought to a checkpoint by `resume`.
        epoch_metrics: called after each epoch; its record goes into the history.

    Raises:
        BidmatchError: the loss or a weight is no finite number any more.
    """
    config, state = training.config, training.state
    saved_at = time.monotonic()
    while state.epoch < config.epochs:
        started = time.monotonic()
        saved_at = _run_epoch(training, saved_at)
        if not (_all_finite(training.model) and _all_finite(training.classifiers)):
            raise _diverged(config, "weights are no numbers any more", state.epoch, state.step - 1)
        losses = {name: value / state.step for name, value in state.loss_sums.items()}
        record: dict[str, Any] = {"epoch": state.epoch + 1, "loss": losses}
        record["train_seconds"] = round(time.monotonic() - started, 3)
        record |= epoch_metrics(training)
        state.history.append(record)
        state.epoch, state.step, state.loss_sums = state.epoch + 1, 0, {}
        if state.epoch < config.epochs and time.monotonic() - saved_at >= config.checkpoint_seconds:
            training.save()
            saved_at = time.monotonic()
    state.finished = True
    training.save()
