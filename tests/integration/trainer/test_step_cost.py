"""A step of Algorithm 1 touches the label pool's rows of Ψ and nothing else that grows with the labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from trainer.classifiers.table import TableClassifier
from trainer.config import BatchConfig, TrainConfig
from trainer.corpus import TokenSource
from trainer.devices import choose_device
from trainer.encoders.bag import BagEncoder
from trainer.loop import Training
from trainer.model import DualHeadModel
from trainer.plan import STEP_STREAM, Plan, stream
from trainer.sampling import label_pool
from trainer.step import sample_pools, train_step
from trainer.tokenise import TokenisedTexts

QUERIES, BASE, WORDS = 64, 500, 300


def texts(count: int, seed: int) -> TokenSource:
    ids = np.random.default_rng(seed).integers(0, WORDS, 3 * count, dtype=np.int32)
    return TokenSource(TokenisedTexts(ids, np.arange(count + 1) * 3))


def training_with(labels: int) -> Training:
    """A run whose 500 clicked labels are spread over `labels` rows; its batches do not depend on `labels`."""
    config = TrainConfig(
        dim=16, batch=BatchConfig(queries=16, cluster_size=1), device="cpu", precision="fp32", threads=1
    )
    rng = np.random.default_rng(0)
    stride = labels // BASE
    columns = stride * np.stack([rng.permutation(BASE)[:5] for _ in range(QUERIES)])
    clicks = sp.csr_matrix(
        (np.ones(5 * QUERIES, np.float32), np.sort(columns, 1).ravel(), np.arange(QUERIES + 1) * 5),
        (QUERIES, labels),
    )
    hard = stride * rng.integers(0, BASE, (QUERIES, 15), dtype=np.int32)
    torch.manual_seed(0)
    return Training(
        config=config,
        device=choose_device(config),
        run=Path("unused"),
        model=DualHeadModel(BagEncoder(WORDS, 16, 0.0, 0.0), [(8, 8)], 0.0).train(),
        classifiers=nn.ModuleDict({"narrow": TableClassifier(labels, 8)}),
        architecture={},
        tokenizer=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        queries=texts(QUERIES, 1),
        labels=texts(labels, 2),
        targets=clicks,
        plan=Plan(np.arange(QUERIES, dtype=np.int32), hard),
    )


def test_extra_positives_widen_the_classifiers_pool_alone():
    """β_C: with as many as there are, the classifier sees all positives of the batch, the encoder β."""
    training = training_with(5000)
    rows = np.arange(16)
    plain = sample_pools(training, rows, np.random.default_rng(3))
    assert plain.classifier is plain.encoder
    batch = training.config.batch.model_copy(update={"extra_positives": 5})
    training.config = training.config.model_copy(update={"batch": batch})
    pools = sample_pools(training, rows, np.random.default_rng(3))
    np.testing.assert_array_equal(pools.encoder.labels, plain.encoder.labels)
    every = np.unique(training.targets[rows].indices)
    assert set(pools.classifier.labels) == set(every) | set(plain.encoder.labels) > set(plain.encoder.labels)
    np.testing.assert_array_equal(pools.classifier.positives.sum(1), np.full(16, 5))
    np.testing.assert_array_equal(pools.classifier.labels[pools.columns], pools.encoder.labels)


def table_of(training: Training) -> nn.Parameter:
    return training.classifiers["narrow"].psi.weight


def test_only_the_pools_rows_of_the_table_and_its_moments_change():
    training = training_with(5000)
    dense, rows = training.optimisers
    state = rows.state[table_of(training)]
    seen = np.zeros(5000, dtype=np.int64)
    for number in range(3):
        training.state.step = training.state.global_step = number
        batch = np.arange(16) + 16 * number
        rng = stream(training.config.seed, STEP_STREAM, 0, number)
        rng.integers(2**62, size=2)
        pool = label_pool(training.targets, batch, training.plan.hard[batch], 3, 3, rng)
        assert 16 < len(pool.labels) <= 16 * 6
        before = {"Ψ": table_of(training).detach().clone()} | {n: v.clone() for n, v in state.items()}
        train_step(training, batch)
        seen[pool.labels] += 1
        assert table_of(training).grad.coalesce().indices()[0].tolist() == pool.labels.tolist()
        for name, value in {"Ψ": table_of(training).detach(), **state}.items():
            changed = (value != before[name]).reshape(5000, -1).any(1).nonzero().ravel().tolist()
            assert changed == pool.labels.tolist(), name
    assert state["updates"].tolist() == seen.tolist()
    assert all(
        parameter is not table_of(training) for group in dense.param_groups for parameter in group["params"]
    )


def allocations(training: Training) -> tuple[int, int]:
    """Bytes of all tensors that one step makes, and of the largest."""
    # The first step makes what stays: moments of the dense parameters.
    train_step(training, np.arange(16))
    training.state.step = training.state.global_step = 1
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        train_step(training, np.arange(16, 32))
    sizes = [
        event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    made = [size for size in sizes if size > 0]
    return sum(made), max(made)


def test_memory_of_a_step_does_not_grow_with_the_labels():
    small, large = training_with(1000), training_with(100_000)
    total, largest = allocations(small)
    # The label texts differ, and so, by a little, does the number of distinct words.
    assert allocations(large) == (pytest.approx(total, rel=0.02), pytest.approx(largest, rel=0.02))
    assert largest < table_of(large).nbytes / 10
