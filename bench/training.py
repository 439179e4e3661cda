"""Does a training step's cost grow with the number of phrases? Step time and memory at L = 10^5 and 10^6.

    python -m bench.training [--json] [--steps N] [--threads N]

Both runs take the very same steps: the same queries, the same label texts, the same label pools L_B. In the
larger one the labels of the smaller are spread over ten times as many rows of Ψ. Steps alternate between the
two, and the median ratio of neighbouring steps is compared, so that a busy machine slows both alike. Memory
is what a step allocates at its peak beyond what stays: Ψ and its moments, which must grow with L, are not
counted.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import click
import numpy as np
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from bidmatch.base.console import emit_json, progress
from trainer.config import BagEncoderConfig, BatchConfig, TrainConfig
from trainer.corpus import TokenSource
from trainer.devices import choose_device
from trainer.encoders.bag import BagEncoder
from trainer.encoders.base import TextBatch
from trainer.loop import Training, train_step
from trainer.model import DualHeadModel
from trainer.plan import Plan
from trainer.tokenise import TokenisedTexts

LIMIT = 1.10
SMALL, LARGE = 100_000, 1_000_000
VOCABULARY, WIDTH = 30_522, 384
TOKENS_A_TEXT = 4
QUERIES = 20_000
POSITIVES_A_QUERY = 5


class SpreadTexts:
    """The texts of `base`, label i of it standing at row i * stride."""

    def __init__(self, base: TokenSource, stride: int):
        self.base, self.stride = base, stride
        self.tokens = base.tokens

    def batch(self, rows: np.ndarray, device: torch.device) -> TextBatch:
        """The given texts (int64 rows), padded, on the device."""
        return self.base.batch(rows // self.stride, device)


def random_texts(count: int, seed: int) -> TokenSource:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, count * TOKENS_A_TEXT, dtype=np.int32)
    return TokenSource(TokenisedTexts(ids, np.arange(count + 1) * TOKENS_A_TEXT))


def random_log(rng: np.random.Generator, labels: int) -> sp.csr_matrix:
    columns = np.sort(rng.integers(0, labels, (QUERIES, POSITIVES_A_QUERY)), axis=1)
    shape = (QUERIES, labels)
    ends = np.arange(QUERIES + 1) * POSITIVES_A_QUERY
    return sp.csr_matrix((np.ones(columns.size, np.float32), columns.ravel(), ends), shape)


def make_training(config: TrainConfig, labels: int) -> Training:
    """A run at `labels` phrases whose every batch is that of a run at `SMALL` phrases."""
    stride = labels // SMALL
    rng = np.random.default_rng(config.seed)
    clicks = random_log(rng, SMALL)
    clicks = sp.csr_matrix((clicks.data, clicks.indices * stride, clicks.indptr), (QUERIES, labels))
    batch = config.batch
    hard = rng.integers(0, SMALL, (QUERIES, batch.hard_negatives * batch.refresh), dtype=np.int32) * stride
    torch.manual_seed(config.seed)
    model = DualHeadModel(BagEncoder(VOCABULARY, WIDTH, 0.0, 0.0), config.dim, config.head_dropout)
    table = nn.Embedding(labels, config.dim // 2, sparse=True)
    training = Training(
        config=config,
        device=choose_device(config),
        run=Path("unused"),
        model=model.train(),
        table=table,
        architecture={},
        tokenizer=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        queries=random_texts(QUERIES, 1),
        labels=SpreadTexts(random_texts(SMALL, 2), stride),
        clicks=clicks,
        plan=Plan(np.arange(QUERIES, dtype=np.int32), hard),
    )
    # A first step of each makes what stays: the moments of the dense parameters.
    step(training, 0)
    return training


def step(training: Training, number: int) -> float:
    """Take one step on the batch of this number; seconds."""
    size = training.config.batch.queries
    rows = (np.arange(size) + number * size) % QUERIES
    training.state.epoch, training.state.step = divmod(number, training.steps_an_epoch)
    training.state.global_step = number
    started = time.perf_counter()
    train_step(training, rows)
    return time.perf_counter() - started


def peak_bytes(training: Training, number: int) -> int:
    """Most bytes that one step holds at a time beyond what it found: torch's tensors plus numpy's arrays."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    for optimiser in training.optimisers:
        optimiser.zero_grad(set_to_none=True)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(training, number)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = np.cumsum([event.nbytes() for event in events])
    return int(held.max(initial=0)) + peak - before


def measure(config: TrainConfig, steps: int) -> dict:
    runs = {labels: make_training(config, labels) for labels in (SMALL, LARGE)}
    peaks = {labels: peak_bytes(run, 1) for labels, run in runs.items()}
    seconds: dict[int, list[float]] = {labels: [] for labels in runs}
    with progress("steps at both sizes", steps, "pairs of steps") as bar:
        for number in range(2, steps + 7):
            # Each goes first half of the time, so that neither always finds the caches warm.
            for labels in (SMALL, LARGE) if number % 2 else (LARGE, SMALL):
                taken = step(runs[labels], number)
                # The first pairs warm up.
                if number >= 7:
                    seconds[labels].append(taken)
            bar.advance(number >= 7)
    rows = [
        {
            "labels": labels,
            "step_ms": round(1e3 * float(np.median(seconds[labels])), 3),
            "step_ms_quartiles": [round(1e3 * float(q), 3) for q in np.percentile(seconds[labels], [25, 75])],
            "peak_mb": round(peaks[labels] / 1e6, 3),
            "table_and_moments_mb": round(3 * labels * config.dim // 2 * 4 / 1e6, 1),
        }
        for labels in runs
    ]
    ratio = float(np.median(np.array(seconds[LARGE]) / np.array(seconds[SMALL])))
    return {
        "rows": rows,
        "steps": steps,
        "queries_a_batch": config.batch.queries,
        "dim": config.dim,
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "step_time_ratio": round(ratio, 4),
        "memory_ratio": round(peaks[LARGE] / peaks[SMALL], 4),
        "limit": LIMIT,
        "within_limit": bool(max(ratio, peaks[LARGE] / peaks[SMALL]) <= LIMIT),
    }


@click.command()
@click.option(
    "--steps", default=100, show_default=True, type=click.IntRange(min=1), help="Timed at each size."
)
@click.option(
    "--queries", default=256, show_default=True, type=click.IntRange(min=2), help="Queries a batch."
)
@click.option("--dim", default=64, show_default=True, help="Width of the served vector.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(steps: int, queries: int, dim: int, threads: int, as_json: bool) -> None:
    """Step time and memory at 10^5 and 10^6 phrases; fails where either grows by more than the limit."""
    config = TrainConfig(
        encoder=BagEncoderConfig(),
        dim=dim,
        batch=BatchConfig(queries=queries, cluster_size=1),
        device="cpu",
        precision="fp32",
        threads=threads,
    )
    result = measure(config, steps)
    if as_json:
        emit_json(result)
    else:
        click.echo(
            f"{'phrases':>10} {'step, ms':>10} {'(quartiles)':>16} {'peak, MB':>10} {'Ψ + moments, MB':>16}"
        )
        for row in result["rows"]:
            low, high = row["step_ms_quartiles"]
            click.echo(
                f"{row['labels']:10,} {row['step_ms']:10.2f} {f'({low:.2f}, {high:.2f})':>16} "
                f"{row['peak_mb']:10.2f} {row['table_and_moments_mb']:16.1f}"
            )
        click.echo(
            f"ratio of time {result['step_time_ratio']:.3f}, of memory {result['memory_ratio']:.3f} "
            f"(limit {LIMIT}); {steps} steps each, {result['threads']} of {result['cpu_count']} cores"
        )
    if not result["within_limit"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
