"""Encoding a batch in chunks changes what a step costs in memory and in time, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel

from trainer.classifiers.pairs import new_classifiers
from trainer.config import BatchConfig, LossConfig, OptimiserConfig, TrainConfig
from trainer.corpus import TokenSource
from trainer.devices import choose_device
from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import Encoder
from trainer.encoders.transformer import TransformerEncoder
from trainer.loop import Training
from trainer.model import DualHeadModel, widths_of
from trainer.plan import STEP_STREAM, Plan, stream
from trainer.step import batch_loss, sample_pools, train_step
from trainer.tokenise import TokenisedTexts
from trainer.vectors import Texts, Vectors

LABELS, WORDS = 2000, 200


def texts(count: int, seed: int, longest: int = 12) -> TokenSource:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, longest + 1, count))])
    return TokenSource(TokenisedTexts(rng.integers(0, WORDS, offsets[-1], dtype=np.int32), offsets))


def transformer(dropout: float) -> Encoder:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = BertModel(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
    return TransformerEncoder(model, "mean", 0)


def bag(dropout: float) -> Encoder:
    torch.manual_seed(0)
    return BagEncoder(WORDS, 32, dropout, 0.0)


def training_of(
    encoder: Encoder, chunk: int, dropout: float = 0.0, queries: int = 24, positives: int = 5, wide: int = 0
) -> Training:
    config = TrainConfig(
        dim=16,
        wide_dim=wide,
        head_dropout=dropout,
        loss=LossConfig(served=0.5),
        batch=BatchConfig(
            queries=queries, chunk=chunk, positives=2, hard_negatives=1, refresh=1, extra_positives=2
        ),
        optimiser=OptimiserConfig(max_grad_norm=0),
        device="cpu",
        precision="fp32",
        threads=1,
    )
    rng = np.random.default_rng(0)
    columns = np.stack([rng.choice(LABELS, positives, replace=False) for _ in range(queries)])
    clicks = sp.csr_matrix(
        (
            np.ones(columns.size, np.float32),
            np.sort(columns, 1).ravel(),
            np.arange(queries + 1) * positives,
        ),
        (queries, LABELS),
    )
    torch.manual_seed(1)
    return Training(
        config=config,
        device=choose_device(config),
        run=Path("unused"),
        model=DualHeadModel(encoder, widths_of(config), dropout).train(),
        classifiers=new_classifiers(config, LABELS),
        architecture={},
        tokenizer=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        queries=texts(queries, 1),
        labels=texts(LABELS, 2),
        targets=clicks,
        plan=Plan(np.arange(queries, dtype=np.int32), rng.integers(0, LABELS, (queries, 1)).astype(np.int32)),
    )


def gradients(training: Training) -> dict[str, torch.Tensor]:
    """What one step on all queries leaves, and its losses."""
    losses = train_step(training, np.arange(training.targets.shape[0]))
    found = {name: torch.tensor(value) for name, value in losses.items()}
    for module in (training.model, training.classifiers):
        for name, parameter in module.named_parameters():
            found[name] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return found


@pytest.mark.parametrize("encoder", [bag, transformer])
@pytest.mark.parametrize("chunk", [1, 7, 24])
def test_gradients_do_not_depend_on_the_chunk(encoder, chunk):
    whole = gradients(training_of(encoder(0.0), 0, wide=32))
    chunked = gradients(training_of(encoder(0.0), chunk, wide=32))
    assert whole.keys() == chunked.keys()
    for name, value in chunked.items():
        scale = float(whole[name].abs().max())
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=name)


def loss_of(training: Training) -> float:
    """The loss of the very step that `gradients` takes, dropout masks included."""
    rows = np.arange(training.targets.shape[0])
    rng = stream(training.config.seed, STEP_STREAM, 0, 0)
    seeds = [int(seed) for seed in rng.integers(2**62, size=2)]
    pools = sample_pools(training, rows, rng)
    with torch.no_grad():
        texts = [Texts(training.queries, rows, True), Texts(training.labels, pools.encoder.labels, False)]
        queries, labels = Vectors(training, texts, seeds[0]).pairs
        return float(batch_loss(training, queries, labels, pools)["total"])


@pytest.mark.parametrize("chunk", [0, 7])
def test_with_dropout_the_gradient_is_that_of_the_loss_under_the_same_masks(chunk):
    def fresh() -> Training:
        return training_of(transformer(0.3), chunk, dropout=0.3)

    found = gradients(fresh())
    moved = fresh()
    assert loss_of(moved) == pytest.approx(float(found["total"]), rel=1e-6)
    named = dict(moved.model.named_parameters())
    direction = {name: found[name] / found[name].norm() for name in named if found[name].norm() > 0}
    step = 2e-3
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, change in direction.items():
                named[name] += sign * step * change
        losses.append(loss_of(moved))
    slope = (losses[0] - losses[1]) / (2 * step)
    assert slope == pytest.approx(sum(float(found[name].norm()) for name in direction), rel=0.02)


def peak_bytes(training: Training) -> int:
    """Most bytes that the tensors of one step hold at a time, beyond what was there before."""
    gradients(training)  # makes what stays: moments of the dense parameters
    for optimiser in training.optimisers:
        optimiser.zero_grad(set_to_none=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        train_step(training, np.arange(training.targets.shape[0]))
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in events]).max())


def test_peak_memory_is_bounded_by_the_chunk():
    few, many = (peak_bytes(training_of(transformer(0.1), 8, queries=count)) for count in (32, 128))
    whole_few, whole_many = (
        peak_bytes(training_of(transformer(0.1), 0, queries=count)) for count in (32, 128)
    )
    # Encoded in chunks, a further query costs its vectors and scores; elsewhere, all its activations.
    assert many - few < 0.1 * (whole_many - whole_few)
    assert many < whole_few


def test_peak_memory_does_not_grow_with_the_positives():
    few, many = (peak_bytes(training_of(transformer(0.1), 8, positives=count)) for count in (6, 600))
    assert many == pytest.approx(few, rel=0.05)
