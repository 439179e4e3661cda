"""One step of Algorithm 1: pool, vectors, loss, gradients, update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.classifiers.pairs import classifier_at
from trainer.config import CascadeConfig, SampledConfig
from trainer.losses.unidec import distillation_loss, scores_of, unidec_loss, without_filtered
from trainer.model import HeadVectors
from trainer.optimise import learning_rate_factor, set_rates
from trainer.plan import STEP_STREAM, stream
from trainer.sampling import LabelPool, filtered_in_pool, label_pool, sample_positives, widened
from trainer.vectors import Texts, Vectors

if TYPE_CHECKING:
    from trainer.loop import Training


@dataclass(frozen=True)
class Pools:
    """The label pools of a step.

    Attributes:
        encoder: L_B, whose texts are encoded.
        classifier: the classifier's pool: L_B, and further labels.
        columns: int64, where L_B's labels stand in the classifier's pool.
        encoder_filtered: bool (n, m), pairs on L_B that are neither positive nor negative; None for none.
        classifier_filtered: likewise, on the classifier's pool.
    """

    encoder: LabelPool
    classifier: LabelPool
    columns: np.ndarray
    encoder_filtered: np.ndarray | None = None
    classifier_filtered: np.ndarray | None = None


def sample_pools(training: Training, rows: np.ndarray, rng: np.random.Generator) -> Pools:
    """L_B and the classifier's pool for the training queries `rows`, int64."""
    batch, targets = training.config.batch, training.targets
    assert training.plan is not None
    hard = training.plan.hard[rows]
    pool = label_pool(targets, rows, hard, batch.positives, batch.hard_negatives, rng)
    further = np.zeros(0, dtype=np.int64)
    if batch.all_labels:
        further = np.arange(targets.shape[1])
    elif training.classifiers:
        if batch.extra_positives:
            further = sample_positives(targets, rows, batch.extra_positives, rng)
        if isinstance(training.config.classifier, CascadeConfig | SampledConfig):
            own = classifier_at(training.classifiers, 0).extra_labels(targets[rows], rng)
            further = np.concatenate([further, own])
    classifier = widened(pool, targets, rows, further)
    columns = np.searchsorted(classifier.labels, pool.labels)
    if training.filtered is None:
        return Pools(pool, classifier, columns)
    out = (filtered_in_pool(training.filtered, rows, each.labels) for each in (pool, classifier))
    return Pools(pool, classifier, columns, *out)


def batch_loss(
    training: Training, queries: list[HeadVectors], labels: list[HeadVectors] | None, pools: Pools
) -> dict[str, torch.Tensor]:
    """The step's losses from its vectors: `total` is what is minimised.

    Args:
        training: the run.
        queries: of the batch, by each pair of heads.
        labels: of L_B, likewise; None where the dual encoder is off.
        pools: of the step.
    """
    config, device = training.config.loss, training.device.device
    positives = torch.from_numpy(pools.encoder.positives).to(device)
    classifier_positives = positives
    columns = None
    if pools.classifier is not pools.encoder:
        classifier_positives = torch.from_numpy(pools.classifier.positives).to(device)
        columns = torch.from_numpy(pools.columns).to(device)
    pool = torch.from_numpy(pools.classifier.labels).to(training.table_device)
    filtered = [
        None if out is None else torch.from_numpy(out).to(device)
        for out in (pools.encoder_filtered, pools.classifier_filtered)
    ]
    losses: dict[str, torch.Tensor] = {}
    served: list[torch.Tensor | None] = []
    for level, query in enumerate(queries):
        own = psi = None
        if training.classifiers:
            classifier = classifier_at(training.classifiers, level)
            own = classifier.loss(
                query.phi_c,
                pool,
                classifier_positives,
                config.classifier_temperature,
                config.normalise_classifier,
            )
            psi = classifier.rows(pool).to(device)
        phi_d_z = None if labels is None else labels[level].phi_d
        scores = scores_of(query.phi_d, phi_d_z, query.phi_c, psi, columns, config)
        scores = without_filtered(scores, *filtered)
        served.append(scores.served)
        found = unidec_loss(scores, positives, classifier_positives, config, own)
        if level == 0:
            losses = found
        else:
            losses["wide"] = found["total"]
            losses["total"] = losses["total"] + config.wide * found["total"]
    if config.distillation and len(served) == 2 and served[0] is not None and served[1] is not None:
        losses["distillation"] = distillation_loss(served[0], served[1])
        losses["total"] = losses["total"] + config.distillation * losses["distillation"]
    return losses


def train_step(training: Training, rows: np.ndarray) -> dict[str, float]:
    """One step on the queries `rows` (int64); returns the losses.

    Its cost depends on the batch and its label pool alone, not on the number of labels (unless the
    configuration asks the classifier for all of them).
    """
    config, state, workers = training.config, training.state, training.workers
    rng = stream(config.seed, STEP_STREAM, state.epoch, state.step)
    seeds = [int(seed) for seed in rng.integers(2**62, size=2)]
    pools = sample_pools(training, rows, rng)
    with_classifier = bool(training.classifiers)
    texts = [Texts(training.queries, rows, with_classifier)]
    if config.heads != "classifier":
        texts.append(Texts(training.labels, pools.encoder.labels, classifier=False))
    vectors = Vectors(training, texts, seeds[0])
    queries, labels = vectors.pairs[0], vectors.pairs[1] if len(texts) == 2 else None
    # Losses may draw, too: the same numbers, however the batch was cut up for encoding.
    torch.manual_seed(seeds[1])
    losses = batch_loss(training, queries, labels, pools)
    for optimiser in training.optimisers:
        optimiser.zero_grad(set_to_none=True)
    losses["total"].backward()
    vectors.backward()
    workers.sum_gradients(training.encoded_dense, training.encoded_sparse)
    # Every process has made the classifier's gradient of the whole batch.
    workers.copy_gradients(training.classifiers.parameters())
    if config.optimiser.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(training.dense_parameters, config.optimiser.max_grad_norm)
    total_steps = config.epochs * training.steps_an_epoch
    set_rates(
        training.optimisers, learning_rate_factor(state.global_step, total_steps, config.optimiser.warmup)
    )
    for optimiser in training.optimisers:
        optimiser.step()
    return {name: float(value.detach()) for name, value in losses.items()}
