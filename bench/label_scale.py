"""Step time and peak memory of the same training steps over ever more labels. See `bench.training`.

Every size takes the very same steps: the same queries, the same clicks, the same hard negatives. Only the
rows of Ψ at which the labels stand are spread over more of them, and every label has a text of its own.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bidmatch.base.console import progress, say
from trainer.classifiers.pairs import new_classifiers
from trainer.config import BagEncoderConfig, BatchConfig, TrainConfig
from trainer.corpus import TokenSource
from trainer.devices import choose_device
from trainer.encoders.bag import BagEncoder
from trainer.loop import Training
from trainer.model import DualHeadModel, widths_of
from trainer.plan import Plan
from trainer.row_adam import RowAdam
from trainer.step import train_step
from trainer.tokenise import TokenisedTexts

VOCABULARY, WIDTH = 30_522, 384
TOKENS_A_TEXT = 4
QUERIES = 20_000
POSITIVES_A_QUERY = 5
WARM_UP = 5


@dataclass(frozen=True)
class Scale:
    """What is measured.

    Attributes:
        sizes: numbers of labels, ascending.
        steps: timed steps at each.
        queries: a batch.
        dim: of the served vector.
        threads: CPU threads.
    """

    sizes: tuple[int, ...]
    steps: int
    queries: int
    dim: int
    threads: int


def scale_config(scale: Scale) -> TrainConfig:
    """The CPU preset's kind of run: `bag` encoder, random batches, β = η = 3."""
    return TrainConfig(
        encoder=BagEncoderConfig(),
        dim=scale.dim,
        batch=BatchConfig(queries=scale.queries, cluster_size=1),
        device="cpu",
        precision="fp32",
        threads=scale.threads,
    )


def random_texts(count: int, seed: int) -> TokenSource:
    """Texts of random word pieces, all of one length."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, count * TOKENS_A_TEXT, dtype=np.int32)
    return TokenSource(TokenisedTexts(ids, np.arange(count + 1) * TOKENS_A_TEXT))


def make_training(config: TrainConfig, labels: int, distinct: int) -> Training:
    """A run over `labels` labels, of which `distinct` take part, each at a place of its own."""
    rng = np.random.default_rng(config.seed)
    columns = np.sort(rng.integers(0, distinct, (QUERIES, POSITIVES_A_QUERY)), axis=1).ravel()
    batch = config.batch
    hard = rng.integers(0, distinct, (QUERIES, batch.hard_negatives * batch.refresh))
    stride = labels // distinct
    places = np.arange(distinct) * stride + rng.integers(0, stride, distinct)
    ends = np.arange(QUERIES + 1) * POSITIVES_A_QUERY
    clicks = sp.csr_matrix((np.ones(len(columns), np.float32), places[columns], ends), (QUERIES, labels))
    torch.manual_seed(config.seed)
    model = DualHeadModel(BagEncoder(VOCABULARY, WIDTH, 0.0, 0.0), widths_of(config), config.head_dropout)
    training = Training(
        config=config,
        device=choose_device(config),
        run=Path("unused"),
        model=model.train(),
        classifiers=new_classifiers(config, labels),
        architecture={},
        tokenizer=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        queries=random_texts(QUERIES, 1),
        labels=random_texts(labels, 2),
        targets=clicks,
        plan=Plan(np.arange(QUERIES, dtype=np.int32), places[hard].astype(np.int32)),
    )
    _touch_moments(training)
    return training


def _touch_moments(training: Training) -> None:
    """Write the tables' moments once: zeros that nothing has touched take no memory until a step does."""
    for optimiser in training.optimisers:
        if isinstance(optimiser, RowAdam):
            for state in optimiser.state.values():
                for value in state.values():
                    value.zero_()


def step(training: Training, number: int) -> float:
    """Take the step of this number; seconds."""
    size = training.config.batch.queries
    rows = (np.arange(size) + number * size) % QUERIES
    training.state.epoch, training.state.step = divmod(number, training.steps_an_epoch)
    training.state.global_step = number
    started = time.perf_counter()
    train_step(training, rows)
    return time.perf_counter() - started


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM (its peak) of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def step_memory(scale: Scale, labels: int, distinct: int) -> dict[str, float]:
    """What steps over this many labels hold at their peak beyond what stays between them; MB.

    To be run in a process of its own with `steady_memory` in its environment.
    """
    training = make_training(scale_config(scale), labels, distinct)
    for number in range(WARM_UP):
        step(training, number)
    gc.collect()
    before = resident_bytes("VmRSS")
    # Sets the peak back to what is held now (proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for number in range(WARM_UP, WARM_UP + 20):
        step(training, number)
    peak = resident_bytes("VmHWM") - before
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_mb": round(peak / 1e6, 2), "process_mb": round(whole / 1e6, 1)}


def steady_memory() -> dict[str, str]:
    """Environment under which freed memory goes back at once, so that the peak is what is in use."""
    return {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def step_seconds(scale: Scale, distinct: int) -> dict[int, np.ndarray]:
    """Seconds of each timed step at each size, the sizes taking turns: labels -> float (steps,)."""
    config = scale_config(scale)
    runs = {}
    for labels in scale.sizes:
        say(f"preparing {labels:,} labels")
        runs[labels] = make_training(config, labels, distinct)
    seconds: dict[int, list[float]] = {labels: [] for labels in runs}
    # Steps fill and empty young generations of the collector at moments of their own.
    gc.collect()
    gc.disable()
    with progress("steps at each size", scale.steps, "rounds") as bar:
        for number in range(scale.steps + WARM_UP):
            # Each goes first in turn, so that none always finds the caches warm.
            turn = number % len(scale.sizes)
            for labels in scale.sizes[turn:] + scale.sizes[:turn]:
                taken = step(runs[labels], number)
                if number >= WARM_UP:
                    seconds[labels].append(taken)
            bar.advance(number >= WARM_UP)
    gc.enable()
    return {labels: np.array(taken) for labels, taken in seconds.items()}


def summary(
    scale: Scale, reference: int, seconds: dict[int, np.ndarray], memory: dict[int, dict[str, float]]
) -> dict:
    """Rows by size, and the ratios to `reference` labels; the largest size's are `..._ratio`."""
    rows = []
    for labels in scale.sizes:
        low, middle, high = np.percentile(seconds[labels], [25, 50, 75])
        rows.append(
            {
                "labels": labels,
                "step_ms": round(1e3 * middle, 3),
                "step_ms_quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)],
                # Of neighbouring steps, so that a busy moment slows both.
                "step_time_ratio": round(float(np.median(seconds[labels] / seconds[reference])), 4),
                "peak_mb": memory[labels]["peak_mb"],
                "memory_ratio": round(memory[labels]["peak_mb"] / memory[reference]["peak_mb"], 4),
                "process_mb": memory[labels]["process_mb"],
                "table_and_moments_mb": round(labels * (3 * (scale.dim // 2) + 1) * 4 / 1e6, 1),
            }
        )
    return {
        "rows": rows,
        "reference_labels": reference,
        "steps": scale.steps,
        "queries_a_batch": scale.queries,
        "dim": scale.dim,
        "threads": scale.threads,
        "cpu_count": os.cpu_count(),
        "step_time_ratio": rows[-1]["step_time_ratio"],
        "memory_ratio": rows[-1]["memory_ratio"],
    }
