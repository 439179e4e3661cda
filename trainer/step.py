"""One step of Algorithm 1: pool, vectors, loss, gradients, update.

The loss is computed on vectors alone. Where a batch is encoded in chunks, or by several processes, its
gradients are first taken with respect to the vectors and then carried through the encoder chunk by chunk
(gradient caching), so that the memory of a step is bounded by the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.classifiers.pairs import classifier_at
from trainer.config import CascadeConfig, SampledConfig
from trainer.corpus import TextSource
from trainer.losses.unidec import distillation_loss, scores_of, unidec_loss, without_filtered
from trainer.model import HeadVectors
from trainer.optimise import learning_rate_factor, set_rates
from trainer.plan import STEP_STREAM, stream
from trainer.sampling import LabelPool, filtered_in_pool, label_pool, sample_positives, widened

if TYPE_CHECKING:
    from trainer.loop import Training

# Padded tokens that cost about as much as a further call of the encoder, which keeps a GPU waiting.
_WORTH_A_CALL = {"cpu": 64, "cuda": 4096}


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


def shares_of(lengths: np.ndarray, chunk: int, processes: int) -> list[list[np.ndarray]]:
    """Which texts each process encodes, and which of them at once.

    Texts are dealt out in order of length, so that little is padded and all processes get as much. So long as
    a chunk is smaller than a process's share, chunks are the same however many processes there are.

    Args:
        lengths: tokens of each text, int64 (n,).
        chunk: texts encoded at once; 0: all of a process's share.
        processes: how many.

    Returns:
        for each process its chunks: int64 places of texts in order of length; none are empty.
    """
    order = np.argsort(lengths, kind="stable")
    if chunk and chunk < -(-len(order) // processes):
        pieces = [order[start : start + chunk] for start in range(0, len(order), chunk)]
        return [pieces[process::processes] for process in range(processes)]
    shares = [order[process::processes] for process in range(processes)]
    return [[share] if len(share) else [] for share in shares]


def length_groups(lengths: np.ndarray, worth: int, cuts: int = 2) -> list[slice]:
    """Texts in order of length cut where it saves most padding, so long as it saves `worth` tokens.

    Args:
        lengths: tokens of each text, int64 (n,), ascending.
        worth: padded tokens that cost as much as one more call of the encoder.
        cuts: how often each part is cut again at most.
    """
    saved = np.arange(1, len(lengths)) * (lengths[-1:] - lengths[:-1])
    if not cuts or not len(saved) or saved.max() < worth:
        return [slice(0, len(lengths))]
    at = int(saved.argmax()) + 1
    behind = length_groups(lengths[at:], worth, cuts - 1)
    return [
        *length_groups(lengths[:at], worth, cuts - 1),
        *(slice(at + group.start, at + group.stop) for group in behind),
    ]


class Vectors:
    """What the model makes of a batch of texts, and the way back for its gradients.

    Args:
        training: the run.
        source: the texts.
        rows: which of them, int64 (n,).
        seed: of dropout; a text gets the same mask however many processes there are, so long as the chunks
            are the same.
        classifier: whether Φ_C is needed.

    Attributes:
        pairs: vectors of all n texts by each pair of heads, float32.
    """

    def __init__(
        self, training: Training, source: TextSource, rows: np.ndarray, seed: int, *, classifier: bool
    ):
        self._training, self._source, self._rows = training, source, rows
        self._seed, self._classifier = seed, classifier
        device, workers = training.device.device, training.workers
        offsets = source.tokens.offsets
        self._lengths = offsets[rows + 1] - offsets[rows]
        shares = shares_of(self._lengths, training.config.batch.chunk, workers.count)
        self._chunks = shares[workers.rank]
        # The graph of one chunk is kept: it takes no more memory than making it again would.
        self._graph: torch.Tensor | None = None
        if len(self._chunks) == 1:
            own = self._graph = self._encode(self._chunks[0])
        else:
            with torch.no_grad():
                made = [self._encode(chunk) for chunk in self._chunks]
            own = torch.cat(made) if made else torch.zeros(0, sum(self._widths()), device=device)
        self._whole = workers.count == 1 and self._graph is not None
        order = np.concatenate([np.zeros(0, dtype=np.int64), *(chunk for share in shares for chunk in share)])
        back = torch.from_numpy(np.argsort(order)).to(device)
        if self._whole:
            self._matrix = own[back]
        else:
            sizes = [sum(map(len, share)) for share in shares]
            self._matrix = workers.gather(own.detach(), sizes)[back].requires_grad_()
        self.pairs = self._split(self._matrix)

    def backward(self) -> None:
        """Carry the vectors' gradients into the model's parameters; call it after the loss's own."""
        if self._whole or self._matrix.grad is None:
            return
        for chunk in self._chunks:
            made = self._encode(chunk) if self._graph is None else self._graph
            made.backward(self._matrix.grad[torch.from_numpy(chunk).to(made.device)])

    def _widths(self) -> list[int]:
        pairs = self._training.model.widths
        return [width for d, c in pairs for width in (d, c if self._classifier else 0)]

    def _encode(self, chunk: np.ndarray) -> torch.Tensor:
        training, device = self._training, self._training.device.device
        torch.manual_seed(self._seed + int(chunk[0]))
        lengths, parts = self._lengths[chunk], []
        # Word vectors with sparse gradients make an encoder of little else, and each call's are to be merged.
        whole = [slice(0, len(chunk))]
        groups = whole if training.encoded_sparse else length_groups(lengths, _WORTH_A_CALL[device.type])
        with training.device.autocast():
            for group in groups:
                batch = self._source.batch(self._rows[chunk[group]], device)
                pairs = training.model.encode(batch, classifier=self._classifier)
                parts.append(torch.cat([part.float() for pair in pairs for part in pair], dim=1))
        return torch.cat(parts)

    def _split(self, matrix: torch.Tensor) -> list[HeadVectors]:
        parts = torch.split(matrix, self._widths(), dim=1)
        return [HeadVectors(d, c) for d, c in zip(parts[::2], parts[1::2], strict=True)]


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
    seeds = [int(seed) for seed in rng.integers(2**62, size=3)]
    pools = sample_pools(training, rows, rng)
    with_classifier = bool(training.classifiers)
    queries = Vectors(training, training.queries, rows, seeds[0], classifier=with_classifier)
    labels = None
    if config.heads != "classifier":
        labels = Vectors(training, training.labels, pools.encoder.labels, seeds[1], classifier=False)
    # Losses may draw, too: the same numbers, however the batch was cut up for encoding.
    torch.manual_seed(seeds[2])
    losses = batch_loss(training, queries.pairs, labels.pairs if labels else None, pools)
    for optimiser in training.optimisers:
        optimiser.zero_grad(set_to_none=True)
    losses["total"].backward()
    for vectors in (queries, labels):
        if vectors is not None:
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
