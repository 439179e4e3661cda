"""Multi-Head Encoding on the other two tasks it is meant for: one label an example, and pretraining.

Both are simulated and self-contained. The plain classifier is the one-headed product, which is the softmax
over all labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import nn
from torch.nn.functional import gelu

from trainer.classifiers.base import Classifier
from trainer.classifiers.build import make_codes, new_classifier
from trainer.classifiers.decode import CodeBook, product_top_k
from trainer.classifiers.product import ProductClassifier
from trainer.config import ProductConfig, SampledConfig
from trainer.losses.supcon import supcon
from trainer.row_adam import RowAdam

BATCH = 256
TEST = 2000
SOFTMAX = ProductConfig(heads=1, codes="ids")

# Features and labels, int64 (n,), of this many fresh examples.
Draw = Callable[[int, np.random.Generator], tuple[torch.Tensor, np.ndarray]]


def train(encoder: nn.Module, classifier: Classifier, draw: Draw, steps: int, rate: float) -> dict[str, Any]:
    """Train both by cross-entropy on fresh batches; accuracy is that on fresh examples, in percent."""
    dense = [p for p in encoder.parameters() if not _is_table(encoder, p)] + classifier.dense_parameters()
    tables = [p for p in encoder.parameters() if _is_table(encoder, p)] + classifier.sparse_parameters()
    optimisers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=rate)]
    if tables:
        optimisers.append(RowAdam(tables, lr=rate))
    schedule = [torch.optim.lr_scheduler.OneCycleLR(o, rate, total_steps=steps + 1) for o in optimisers]
    rng = np.random.default_rng(1)
    seconds = []
    for _ in range(steps):
        features, labels = draw(BATCH, rng)
        started = time.perf_counter()
        loss = _loss(encoder(features), classifier, labels, rng)
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        for optimiser, rates in zip(optimisers, schedule, strict=True):
            optimiser.step()
            rates.step()
        seconds.append(time.perf_counter() - started)
    features, labels = draw(TEST, np.random.default_rng(2))
    with torch.no_grad():
        found = _first(encoder(features), classifier)
    return {
        "parameters of the classifier": sum(p.numel() for p in classifier.parameters()),
        "step_ms": round(1e3 * float(np.median(seconds)), 2),
        "seconds": round(sum(seconds), 1),
        "accuracy": round(100 * float((found == labels).mean()), 2),
    }


def _is_table(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(isinstance(m, nn.Embedding) and m.sparse and m.weight is parameter for m in module.modules())


def _loss(
    phi: torch.Tensor, classifier: Classifier, labels: np.ndarray, rng: np.random.Generator
) -> torch.Tensor:
    one = sp.csr_matrix(
        (np.ones(len(labels), np.float32), (np.arange(len(labels)), labels)),
        (len(labels), classifier.labels),
    )
    pool = np.union1d(labels, classifier.extra_labels(one, rng))
    names = torch.from_numpy(pool)
    positives = torch.zeros(len(labels), len(pool))
    positives[torch.arange(len(labels)), torch.from_numpy(np.searchsorted(pool, labels))] = 1
    own = classifier.loss(phi, names, positives, 1.0, False)
    return own if own is not None else supcon(phi @ classifier.rows(names).T, positives)


def _first(phi: torch.Tensor, classifier: Classifier) -> np.ndarray:
    """The best label of each of float (n, d) examples, int64 (n,)."""
    if isinstance(classifier, ProductClassifier):
        book = CodeBook.of(classifier.codes.numpy(), classifier.lengths)
        scores = [head.numpy() for head in classifier.local_scores(phi, 1.0, False)]
        return product_top_k(scores, book, 1)[0][:, 0]
    best: np.ndarray = (phi @ classifier.table(0, classifier.labels).T).argmax(1).numpy()
    return best


def single_label_task(steps: int, classes: int = 2000) -> list[dict[str, Any]]:
    """Each example has one of `classes` labels: the product of short heads against the plain softmax.

    A class is a place in 32 dimensions, near those of its topic; an example is its place with noise, seen
    through a fixed nonlinear map into 128 features.
    """
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((max(1, classes // 25), 32))
    places = topics[rng.integers(0, len(topics), classes)] + 0.6 * rng.standard_normal((classes, 32))
    mixing = rng.standard_normal((32, 128)) * 32**-0.5

    def see(latent: np.ndarray) -> np.ndarray:
        return np.tanh(latent @ mixing).astype(np.float32)

    def draw(count: int, source: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
        labels = source.integers(0, classes, count)
        return torch.from_numpy(see(places[labels] + 0.5 * source.standard_normal((count, 32)))), labels

    # What an embedding of the label's name would be: the features of one example.
    names = see(places + 0.3 * rng.standard_normal(places.shape))
    names /= np.linalg.norm(names, axis=1, keepdims=True)
    results = []
    for title, config in {
        "plain softmax": SOFTMAX,
        "mhp, 2 heads, codes from clusters": ProductConfig(heads=2),
        "mhp, 2 heads, codes from ids": ProductConfig(heads=2, codes="ids"),
        "mhp, 3 heads, codes from clusters": ProductConfig(heads=3),
    }.items():
        torch.manual_seed(0)
        encoder = nn.Sequential(
            nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 128)
        )
        codes = make_codes(config, names, classes, np.random.default_rng(0))
        found = train(encoder, new_classifier(config, classes, 128, codes), draw, steps, 3e-3)
        results.append({"classifier": title, "labels": classes} | found)
    return results


class NextToken(nn.Module):
    """Φ of the two tokens before: their vectors joined, one hidden layer."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, sparse=True)
        self.hidden = nn.Linear(2 * width, 2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Float (n, d) of int64 (n, 2) tokens."""
        vectors: torch.Tensor = self.out(gelu(self.hidden(self.tokens(context).flatten(1))))
        return vectors


def pretraining_task(steps: int, vocabulary: int = 20_000, known: float = 0.7) -> list[dict[str, Any]]:
    """Predict the next token: groups of tokens sampled a step (mhs) against the softmax over all of them.

    Tokens follow Zipf's law. With probability `known` the next token is the one that follows the last (a
    fixed map), else any by frequency. Token ids are ranks of frequency, as in most vocabularies, and the
    codes are those of the ids.
    """
    rng = np.random.default_rng(0)
    weights = 1 / (10.0 + np.arange(vocabulary))
    cumulative = np.cumsum(weights / weights.sum())
    # The follower is about as frequent as the token, so that what follows stays by Zipf's law.
    follower = np.argsort(np.log(10.0 + np.arange(vocabulary)) + 0.5 * rng.standard_normal(vocabulary))

    def tokens(count: int, source: np.random.Generator) -> np.ndarray:
        found: np.ndarray = np.searchsorted(cumulative, source.random(count) * cumulative[-1])
        return found

    def draw(count: int, source: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
        context = np.stack([tokens(count, source), tokens(count, source)], axis=1)
        follows = source.random(count) < known
        return torch.from_numpy(context), np.where(follows, follower[context[:, 1]], tokens(count, source))

    kinds: dict[str, ProductConfig | SampledConfig] = {
        "softmax over the vocabulary": SOFTMAX,
        "mhs, up to 2048 tokens a step": SampledConfig(codes="ids", most_labels=2048),
        "mhs, up to 512 tokens a step": SampledConfig(codes="ids", most_labels=512),
    }
    results = []
    for title, config in kinds.items():
        torch.manual_seed(0)
        encoder = NextToken(vocabulary, 64)
        codes = make_codes(config, None, vocabulary, np.random.default_rng(0))
        found = train(encoder, new_classifier(config, vocabulary, 64, codes), draw, steps, 1e-2)
        results.append(
            {"classifier": title, "labels": vocabulary} | found | {"best possible": round(100 * known, 1)}
        )
    return results
