"""Our training step beside sentence-transformers' trainer with its multiple-negatives loss.

Both train the whole of the packaged MiniLM-L6 on the same log, in one process, on the same threads, and
encode the same number of texts a step. Every text is exactly `tokens` tokens long for both: its words are
repeated, and both cut at that length. Steps alternate: one of theirs, one of ours, and so on; a step is all
that its trainer does for it, from taking the batch to the updated weights.

Both learn from the same supervision: up to β = 3 sampled phrases of each query. Their trainer takes pairs of
a query and a phrase, in random order (its default), so that a query with three phrases is encoded three
times, and its phrases once a pair. Our step takes as many queries as make the same number of texts with the
distinct phrases that belong to them (no hard negatives), in batches of similar queries, as the method makes
them: each query and each distinct phrase is encoded once. A query counts as done when its sampled phrases
are: theirs are the pairs over the mean number of phrases a query. They tokenise in each step, we did before.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.environments import SENTENCE_TRANSFORMERS, prepare
from bidmatch.base.console import progress, say

WARM_UP = 2
POSITIVES = 3
PACKAGES = ("sentence-transformers", "transformers", "accelerate", "torch")


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        data: a log; None for a simulated one.
        queries: of the log, used at most.
        texts: encoded a step, by each.
        tokens: of every text.
        pairs: timed steps of each.
        threads: CPU threads.
        bf16: whether both encode under bf16 autocast.
    """

    data: Path | None
    queries: int
    texts: int
    tokens: int
    pairs: int
    threads: int
    bf16: bool


@dataclass
class Clock:
    """Seconds, texts, (query, phrase) pairs and queries of each timed step."""

    seconds: list[float] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    queries: list[float] = field(default_factory=list)

    def add(self, seconds: float, texts: int, pairs: int, queries: float) -> None:
        """Count one step."""
        self.seconds.append(seconds)
        self.texts.append(texts)
        self.pairs.append(pairs)
        self.queries.append(queries)

    def rates(self, of: str) -> np.ndarray:
        """`texts`, `pairs` or `queries` a second of each step, float (steps,)."""
        return np.array(getattr(self, of)) / np.array(self.seconds)

    def figures(self) -> dict[str, float]:
        """Medians of the rates, means of the counts."""
        found = {"step_ms": round(1e3 * float(np.median(self.seconds)), 2)}
        for of in ("texts", "pairs", "queries"):
            found[f"{of}_a_step"] = round(float(np.mean(getattr(self, of))), 1)
            found[f"{of}_per_s"] = round(float(np.median(self.rates(of))), 2)
        return found


def see_their_packages() -> None:
    """Let this process import what sentence-transformers' trainer needs, from its own environment if need be.

    Raises:
        BidmatchError: it can't be installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        for package in SENTENCE_TRANSFORMERS.requirements:
            version(package.partition("==")[0])
    except ModuleNotFoundError:
        prepare(SENTENCE_TRANSFORMERS)
        # Behind our own packages, which it may only add to.
        sys.path.append(str(SENTENCE_TRANSFORMERS.packages))


def read_log(comparison: Comparison) -> tuple[list[str], list[str], Any]:
    """Query texts, phrase texts and clicks, CSR (N, L), of at most the given number of queries."""
    from bidmatch.base.text import key
    from bidmatch.demo.write_log import write_click_log
    from trainer.data.read import read_dataset

    with tempfile.TemporaryDirectory() as scratch:
        path = comparison.data
        if path is None:
            path = Path(scratch) / "log.tsv"
            write_click_log(path, 10_000, 40_000, 0)
        dataset = read_dataset([path])
    train = dataset.train
    rows = np.sort(np.random.default_rng(0).permutation(len(train))[: comparison.queries])
    part = train.take(rows)
    return (
        part.queries.to_pylist(),
        [key(text) for text in dataset.phrases["text"].to_pylist()],
        part.clicks,
    )


def repeated(texts: list[str], tokens: int) -> list[str]:
    """Each text's words over and over, so that it has at least that many tokens (a word has one or more)."""
    made = []
    for text in texts:
        words = text.split() or ["a"]
        made.append(" ".join((words * (-(-tokens // len(words))))[:tokens]))
    return made


class CountedTexts:
    """A source of texts that counts how many are taken from it."""

    def __init__(self, source: Any):
        self.source, self.tokens = source, source.tokens
        self.encoded = 0

    def batch(self, rows: np.ndarray, device: Any) -> Any:
        """The given texts (int64 rows), padded, on the device."""
        self.encoded += len(rows)
        return self.source.batch(rows, device)


class Ours:
    """Our training step on batches of similar queries.

    Args:
        comparison: what is compared.
        queries: texts, N of them.
        phrases: texts, L of them.
        clicks: CSR (N, L).
    """

    def __init__(self, comparison: Comparison, queries: list[str], phrases: list[str], clicks: Any):
        import pyarrow as pa
        import torch

        from trainer.classifiers.pairs import new_classifiers
        from trainer.clustering import balanced_clusters
        from trainer.config import BatchConfig, TrainConfig, TransformerEncoderConfig
        from trainer.corpus import token_source
        from trainer.devices import choose_device
        from trainer.embed import embed
        from trainer.encoders.pretrained import load_tokenizer
        from trainer.loop import Training
        from trainer.model import new_model
        from trainer.plan import Plan

        encoder = TransformerEncoderConfig()

        def config_of(size: int) -> TrainConfig:
            return TrainConfig(
                encoder=encoder,
                max_tokens=comparison.tokens,
                batch=BatchConfig(queries=size, cluster_size=size, positives=POSITIVES, hard_negatives=0),
                device="cpu",
                precision="bf16" if comparison.bf16 else "fp32",
                threads=comparison.threads,
            )

        config = config_of(comparison.texts // 2)
        device = choose_device(config)
        tokenizer = load_tokenizer(encoder.pretrained, comparison.tokens, special_tokens=True)
        self.sources = [
            CountedTexts(token_source(tokenizer, pa.array(texts, pa.large_string()), what))
            for texts, what in ((queries, "queries"), (phrases, "phrases"))
        ]
        self.lengths = [np.unique(source.tokens.lengths).tolist() for source in self.sources]
        torch.manual_seed(0)
        model, architecture = new_model(config)
        (vectors,) = embed(model, self.sources[0], device.device, "encoding queries to cluster them")
        phi_d = vectors.phi_d.numpy()
        targets = clicks.sign().astype(np.float32)
        self.size = self._fitting_size(phi_d, targets, comparison.texts)
        clusters = balanced_clusters(phi_d, self.size, np.random.default_rng(0))
        self.training = Training(
            config=config_of(self.size),
            device=device,
            run=Path("unused"),
            model=model.train(),
            classifiers=new_classifiers(config, len(phrases)),
            architecture=architecture,
            tokenizer=tokenizer,
            queries=self.sources[0],
            labels=self.sources[1],
            targets=targets,
            plan=Plan(clusters, np.zeros((len(queries), 0), dtype=np.int32)),
        )
        self.batches = self._epoch()

    def _fitting_size(self, phi_d: np.ndarray, targets: Any, texts: int) -> int:
        """Queries a batch that come nearest to `texts` texts together with their distinct phrases."""
        from trainer.clustering import balanced_clusters, epoch_batches

        best, nearest = texts // 2, np.inf
        for size in range(max(2, texts // (2 + POSITIVES)), texts):
            rng = np.random.default_rng(0)
            batches = epoch_batches(balanced_clusters(phi_d, size, rng), size, rng)
            mean = float(np.mean([len(rows) + distinct_positives(targets, rows, rng) for rows in batches]))
            if abs(mean - texts) < nearest:
                best, nearest = size, abs(mean - texts)
            if mean > texts:
                break
        return best

    def _epoch(self) -> Any:
        from trainer.clustering import epoch_batches
        from trainer.plan import EPOCH_STREAM, stream

        training, state = self.training, self.training.state
        assert training.plan is not None
        while True:
            order = stream(0, EPOCH_STREAM, state.epoch)
            for rows in epoch_batches(training.plan.clusters, self.size, order):
                yield rows
                state.step += 1
                state.global_step += 1
            state.epoch, state.step = state.epoch + 1, 0

    def step(self) -> tuple[float, int, int, int]:
        """Take a step; seconds, texts encoded, pairs sampled, queries."""
        from trainer.step import train_step

        rows, targets = next(self.batches), self.training.targets
        before = sum(source.encoded for source in self.sources)
        started = time.perf_counter()
        train_step(self.training, rows)
        taken = time.perf_counter() - started
        texts = sum(source.encoded for source in self.sources) - before
        pairs = int(np.minimum(targets.indptr[rows + 1] - targets.indptr[rows], POSITIVES).sum())
        return taken, texts, pairs, len(rows)


def distinct_positives(targets: Any, rows: np.ndarray, rng: np.random.Generator) -> int:
    """Distinct phrases when each query takes up to β of its own."""
    from trainer.sampling import sample_positives

    return len(np.unique(sample_positives(targets, rows, POSITIVES, rng)))


def sampled_pairs(clicks: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of up to β phrases of each query."""
    from trainer.sampling import sample_places

    starts = clicks.indptr[:-1].astype(np.int64)
    places = sample_places(np.diff(clicks.indptr), POSITIVES, rng)
    there = places >= 0
    return np.nonzero(there)[0], clicks.indices[(starts[:, None] + places)[there]]


def compare(comparison: Comparison) -> dict:
    """The figures; to be run in a process of its own."""
    see_their_packages()
    import torch
    from datasets import Dataset as TheirDataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from transformers import PrinterCallback, TrainerCallback

    from trainer.encoders.pretrained import packaged_minilm

    queries, phrases, clicks = read_log(comparison)
    queries, phrases = repeated(queries, comparison.tokens), repeated(phrases, comparison.tokens)
    ours = Ours(comparison, queries, phrases, clicks)
    pairs = comparison.texts // 2
    own, theirs = Clock(), Clock()

    rows, columns = sampled_pairs(clicks, np.random.default_rng(0))
    a_query = len(rows) / len(queries)
    data = TheirDataset.from_dict(
        {"anchor": [queries[row] for row in rows], "positive": [phrases[column] for column in columns]}
    )
    model = SentenceTransformer(str(packaged_minilm()), device="cpu")
    model.max_seq_length = comparison.tokens
    lengths = np.unique(model.preprocess(queries[:100])["attention_mask"].sum(1)).tolist()

    class Turns(TrainerCallback):
        """After each of their steps, one of ours."""

        def __init__(self, bar: Any):
            self.bar, self.done, self.since = bar, 0, time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            taken = time.perf_counter() - self.since
            # Our steps are reproducible at some cost; theirs need not be.
            torch.use_deterministic_algorithms(True)
            step = ours.step()
            torch.use_deterministic_algorithms(False)
            self.done += 1
            if self.done > WARM_UP:
                theirs.add(taken, 2 * pairs, pairs, pairs / a_query)
                own.add(*step)
                self.bar.advance()
            gc.collect()
            self.since = time.perf_counter()

    with (
        tempfile.TemporaryDirectory() as scratch,
        progress("pairs of steps", comparison.pairs, "pairs") as bar,
    ):
        arguments = SentenceTransformerTrainingArguments(
            output_dir=scratch,
            max_steps=comparison.pairs + WARM_UP,
            per_device_train_batch_size=pairs,
            learning_rate=2e-5,
            bf16=comparison.bf16,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_drop_last=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            loss=MultipleNegativesRankingLoss(model),
            callbacks=[Turns(bar)],
        )
        # It would print on stdout.
        trainer.remove_callback(PrinterCallback)
        torch.set_num_threads(comparison.threads)
        torch.use_deterministic_algorithms(False)
        trainer.train()
    return summary(comparison, ours, own, theirs, lengths)


def summary(comparison: Comparison, ours: Ours, own: Clock, theirs: Clock, their_lengths: list[int]) -> dict:
    """Medians of each, and the median ratios of neighbouring steps (ours over theirs)."""
    import torch

    ratios = {of: own.rates(of) / theirs.rates(of) for of in ("texts", "pairs", "queries")}
    lengths = [*ours.lengths, their_lengths]
    if any(found != [comparison.tokens] for found in lengths):
        say(f"warning: not all texts have {comparison.tokens} tokens: {lengths}")
    rng = np.random.default_rng(1)
    targets = ours.training.targets
    random_rows = [rng.permutation(targets.shape[0])[: ours.size] for _ in range(20)]
    return {
        "ours": own.figures(),
        "theirs": theirs.figures(),
        **{f"{of}_per_s_ratio": round(float(np.median(ratio)), 4) for of, ratio in ratios.items()},
        "texts_per_s_ratio_quartiles": [round(float(q), 4) for q in np.percentile(ratios["texts"], [25, 75])],
        "sampled_phrases_a_query": round(float(np.mean(np.minimum(np.diff(targets.indptr), POSITIVES))), 3),
        "distinct_phrases_a_query": {
            "clustered batches": round(float(np.mean(np.array(own.texts) / own.queries)) - 1, 3),
            "random batches": round(
                float(np.mean([distinct_positives(targets, rows, rng) for rows in random_rows])) / ours.size,
                3,
            ),
        },
        "data": "simulated" if comparison.data is None else comparison.data.name,
        "tokens_a_text": comparison.tokens,
        "pairs_of_steps": len(own.seconds),
        "precision": "bf16" if comparison.bf16 else "fp32",
        "threads": torch.get_num_threads(),
        "versions": {package: version(package) for package in PACKAGES},
    }
