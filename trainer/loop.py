"""The training loop: Algorithm 1 of UniDEC, epoch by epoch, resumable at any step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer
from torch import nn

from bidmatch.base.console import progress, say
from trainer.checkpoint import CheckpointState, checkpoints, read_state, restore_training, save_checkpoint
from trainer.clustering import epoch_batches
from trainer.config import TrainConfig
from trainer.corpus import TextSource
from trainer.devices import Device
from trainer.embed import embed
from trainer.losses.unidec import unidec_loss
from trainer.model import DualHeadModel
from trainer.optimise import learning_rate_factor, make_optimisers, set_rates
from trainer.plan import EPOCH_STREAM, STEP_STREAM, Plan, make_plan, stream
from trainer.row_adam import RowAdam
from trainer.sampling import label_pool

EpochMetrics = Callable[["Training"], dict[str, Any]]


@dataclass
class Training:
    """Everything a step reads or changes.

    Attributes:
        config: the whole configuration.
        device: where it computes.
        run: the run folder.
        model: Φ, g1, g2.
        table: Ψ, an embedding of L rows with sparse gradients.
        architecture: what `empty_model` rebuilds the encoder from.
        tokenizer: the encoder's.
        queries: texts of the N training queries.
        labels: texts of the L labels.
        clicks: CSR (N, L) training pairs.
        optimisers: AdamW over the dense parameters, RowAdam over the tables.
        state: where the run stands.
        plan: clusters and hard negatives in force, or None before the first.
    """

    config: TrainConfig
    device: Device
    run: Path
    model: DualHeadModel
    table: nn.Embedding
    architecture: dict[str, Any]
    tokenizer: Tokenizer
    queries: TextSource
    labels: TextSource
    clicks: sp.csr_matrix
    optimisers: tuple[torch.optim.AdamW, RowAdam] = field(init=False)
    state: CheckpointState = field(default_factory=CheckpointState)
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self.optimisers = make_optimisers(self.model, self.table, self.config.optimiser)

    @property
    def steps_an_epoch(self) -> int:
        """Batches that hold every training query once."""
        return max(1, -(-self.clicks.shape[0] // self.config.batch.queries))

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        save_checkpoint(
            self.run,
            self.state,
            self.config,
            self.architecture,
            self.tokenizer,
            self.model,
            self.table,
            self.optimisers,
            self.plan,
        )


def start_table(training: Training) -> None:
    """Ψ_l = g2(Φ(z_l)): the classifier begins where the label texts are (`table_from_text`)."""
    _, phi_c = embed(training.model, training.labels, training.device.device, "starting Ψ from label texts")
    training.table.weight.data.copy_(phi_c)


def resume(training: Training) -> bool:
    """Take up the last whole checkpoint, if there is one; says so. False where there is none.

    Raises:
        DamagedError: the checkpoint was altered.
    """
    found = checkpoints(training.run)
    if not found:
        return False
    training.state = read_state(found[-1])
    if not training.state.finished:
        training.plan = restore_training(found[-1], training.model, training.table, training.optimisers)
        say(
            f"resuming at epoch {training.state.epoch + 1}, step {training.state.step + 1} ({found[-1].name})"
        )
    return True


def train_step(training: Training, rows: np.ndarray) -> dict[str, float]:
    """One step of Algorithm 1 on the queries `rows` (int64); returns the losses.

    Its cost depends on the batch and its label pool L_B alone, not on the number of labels.
    """
    config, state, device = training.config, training.state, training.device.device
    assert training.plan is not None
    rng = stream(config.seed, STEP_STREAM, state.epoch, state.step)
    torch.manual_seed(int(rng.integers(2**63)))
    pool = label_pool(
        training.clicks,
        rows,
        training.plan.hard[rows],
        config.batch.positives,
        config.batch.hard_negatives,
        rng,
    )
    with training.device.autocast():
        phi_d_x, phi_c_x = training.model.encode(training.queries.batch(rows, device))
        phi_d_z, _ = training.model.encode(training.labels.batch(pool.labels, device))
    psi = training.table(torch.from_numpy(pool.labels).to(device))
    positives = torch.from_numpy(pool.positives).to(device)
    losses = unidec_loss(phi_d_x.float(), phi_d_z.float(), phi_c_x.float(), psi, positives, config.loss)
    for optimiser in training.optimisers:
        optimiser.zero_grad(set_to_none=True)
    losses["total"].backward()
    dense = training.optimisers[0]
    if config.optimiser.max_grad_norm:
        parameters = [p for group in dense.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, config.optimiser.max_grad_norm)
    total_steps = config.epochs * training.steps_an_epoch
    factor = learning_rate_factor(state.global_step, total_steps, config.optimiser.warmup)
    set_rates(training.optimisers, factor)
    for optimiser in training.optimisers:
        optimiser.step()
    return {name: float(value.detach()) for name, value in losses.items()}


def _refresh(training: Training) -> None:
    queries, _ = embed(training.model, training.queries, training.device.device, "encoding queries")
    labels, _ = embed(training.model, training.labels, training.device.device, "encoding labels")
    training.plan = make_plan(
        queries,
        labels,
        training.clicks,
        training.config.batch,
        training.config.seed,
        training.state.epoch,
        training.device.threads,
    )


def _run_epoch(training: Training, saved_at: float) -> float:
    config, state = training.config, training.state
    if state.step == 0 and state.epoch % config.batch.refresh == 0:
        _refresh(training)
    assert training.plan is not None
    order = stream(config.seed, EPOCH_STREAM, state.epoch)
    batches = epoch_batches(training.plan.clusters, config.batch.queries, order)
    training.model.train()
    with progress(f"epoch {state.epoch + 1}/{config.epochs}", training.clicks.shape[0], "queries") as bar:
        bar.advance(sum(len(rows) for rows in batches[: state.step]))
        for rows in batches[state.step :]:
            losses = train_step(training, rows)
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
    """
    config, state = training.config, training.state
    saved_at = time.monotonic()
    while state.epoch < config.epochs:
        started = time.monotonic()
        saved_at = _run_epoch(training, saved_at)
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
