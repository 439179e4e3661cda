"""What Multi-Head Encoding buys and costs beside the plain table: parameters, memory, step time, accuracy.

    python -m bench.mhe [--json] [--labels L ...] [--steps N] [--no-tasks]

A simulated log: labels stand in topics; a label's text says roughly where its queries lie, and the rest can
only be learnt from clicks (a shift of the whole topic, which few numbers can hold, and one of each label,
which cannot be shared). Labels are drawn by Zipf's law, queries have one to three of them. Every kind starts
at the label texts, takes the same steps on the same queries, and is scored exactly on fresh ones. Each runs
in a process of its own, so that its peak of memory is its own; memory counts from when the data lie ready.

The single-label and the pretraining-style task are those of `bench.mhe_tasks`.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
import torch
from torch import nn
from torch.nn.functional import normalize

from bench.mhe_tasks import pretraining_task, single_label_task
from bidmatch.base.console import emit_json, progress, say
from trainer.classifiers.base import Classifier
from trainer.classifiers.build import make_codes, new_classifier
from trainer.classifiers.cascade import CascadeClassifier
from trainer.config import CascadeConfig, ProductConfig, SampledConfig, TableConfig
from trainer.losses.supcon import supcon
from trainer.row_adam import RowAdam
from trainer.sampling import positives_in_pool

WIDTH = 32
QUERIES = 256
TEMPERATURE = 0.05
LABELS_A_TOPIC = 50
TEST_QUERIES = 1000
K = 10
REORDERED = 200
KINDS: dict[str, Any] = {
    "table": TableConfig(),
    "mhp": ProductConfig(),
    "mhp, pool loss": ProductConfig(loss="pool"),
    "mhp, 3 heads": ProductConfig(heads=3),
    "mhp, codes from ids": ProductConfig(codes="ids"),
    "mhc": CascadeConfig(),
    "mhs": SampledConfig(),
}


@dataclass(frozen=True)
class SimulatedLog:
    """Labels with texts, and queries drawn for them.

    Attributes:
        texts: float32 (L, d), unit length, what is known of a label without clicks.
        places: float32 (L, d), where its queries lie.
        popularity: float64 (L,), cumulative probability of the labels.
        siblings: int64 (L,), another label of the same topic, or the label itself.
    """

    texts: np.ndarray
    places: np.ndarray
    popularity: np.ndarray
    siblings: np.ndarray

    @classmethod
    def of(cls, labels: int, rng: np.random.Generator) -> SimulatedLog:
        """A log with this many labels."""
        topics = max(1, labels // LABELS_A_TOPIC)
        topic = rng.integers(0, topics, labels)
        texts = _unit(_noise(topics, 1.0, rng)[topic] + _noise(labels, 0.6, rng))
        places = _unit(texts + _noise(topics, 0.6, rng)[topic] + _noise(labels, 0.4, rng))
        weights = 1 / (1.0 + rng.permutation(labels))
        order = np.argsort(topic, kind="stable")
        siblings = np.arange(labels)
        same = topic[order[:-1]] == topic[order[1:]]
        siblings[order[:-1][same]] = order[1:][same]
        return cls(texts, places, np.cumsum(weights / weights.sum()), siblings)

    def queries(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, sp.csr_matrix]:
        """Features, float32 (count, d), and clicks, CSR (count, L), of fresh queries."""
        labels = len(self.texts)
        first = np.searchsorted(self.popularity, rng.random(count) * self.popularity[-1])
        second, third = self.siblings[first], self.siblings[self.siblings[first]]
        rows = np.tile(np.arange(count), 3)
        keep = np.concatenate([np.ones(count, bool), rng.random(count) < 0.5, rng.random(count) < 0.25])
        columns = np.concatenate([first, second, third])[keep]
        clicks = sp.csr_matrix((np.ones(len(columns), np.float32), (rows[keep], columns)), (count, labels))
        clicks.sum_duplicates()
        clicks.data[:] = 1
        centre = clicks @ self.places
        return _unit(_unit(centre) + _noise(count, 0.5, rng)), clicks


def _noise(count: int, length: float, rng: np.random.Generator) -> np.ndarray:
    """Float32 (count, d) of about this length each."""
    return rng.standard_normal((count, WIDTH), dtype=np.float32) * np.float32(length * WIDTH**-0.5)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


class Memory:
    """Resident memory of this process: now, and at its peak since `start` (bytes; Linux)."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget the peak so far."""
        # What was freed goes back first, or it would hide what is taken next.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.begin = self._read("VmRSS")

    def peak(self) -> int:
        """Most bytes held at a time beyond those at the start."""
        return self._read("VmHWM") - self.begin

    def _read(self, field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"/proc/self/status has no {field}")


@dataclass
class Run:
    """A classifier, the projection g2 before it, and their optimisers."""

    classifier: Classifier
    g2: nn.Linear
    optimisers: list[torch.optim.Optimizer]

    @classmethod
    def of(cls, classifier: Classifier) -> Run:
        """A run whose Φ_C begins at the query's features."""
        g2 = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(g2.weight)
        dense = [{"params": list(g2.parameters()), "lr": 2e-4}]
        if classifier.dense_parameters():
            dense.append({"params": classifier.dense_parameters(), "lr": 1e-3})
        optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, weight_decay=0.0)]
        if classifier.sparse_parameters():
            optimisers.append(RowAdam(classifier.sparse_parameters(), lr=1e-3))
        return cls(classifier, g2, optimisers)

    def step(self, features: np.ndarray, clicks: sp.csr_matrix, rng: np.random.Generator) -> int:
        """One step; the size of its pool."""
        classifier = self.classifier
        pool = np.union1d(clicks.indices, classifier.extra_labels(clicks, rng))
        positives = torch.from_numpy(positives_in_pool(clicks, np.arange(len(features)), pool))
        labels = torch.from_numpy(pool)
        phi_c = self.g2(torch.from_numpy(features))
        loss = classifier.loss(phi_c, labels, positives, TEMPERATURE, True)
        if loss is None:
            psi = classifier.rows(labels)
            loss = supcon(normalize(phi_c, dim=1) @ normalize(psi, dim=1).T / TEMPERATURE, positives)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        return len(pool)


@torch.no_grad()
def served_top_k(run: Run, features: np.ndarray) -> np.ndarray:
    """The K labels of largest cosine with ψ_l, int64 (n, K): what an exact index gives."""
    phi_c = normalize(run.g2(torch.from_numpy(features)), dim=1)
    best = torch.full((len(features), K), -torch.inf)
    labels = torch.zeros(len(features), K, dtype=torch.int64)
    block = 10_000
    for start in range(0, run.classifier.labels, block):
        psi = normalize(run.classifier.table(start, min(start + block, run.classifier.labels)), dim=1)
        scores = torch.cat([best, phi_c @ psi.T], dim=1)
        names = torch.arange(start, start + len(psi)).expand(len(features), -1)
        best, place = scores.topk(K, dim=1)
        labels = torch.cat([labels, names], dim=1).gather(1, place)
    return labels.numpy()


@torch.no_grad()
def cascade_top_k(
    run: Run, classifier: CascadeClassifier, features: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The K best labels by the cascade, and by p(group)·exp(member's score) among its `REORDERED` best."""
    phi_c = run.g2(torch.from_numpy(features))
    labels, scores = classifier.best(phi_c, REORDERED, TEMPERATURE, True)
    logs = torch.log_softmax(classifier.group_scores(phi_c, TEMPERATURE, True), 1)
    groups = classifier.groups_of(labels.clamp(min=0).flatten()).view_as(labels)
    product = (scores + logs.gather(1, groups)).masked_fill(labels < 0, -torch.inf)
    return labels[:, :K].numpy(), labels.gather(1, product.topk(K, dim=1).indices).numpy()


def quality(found: np.ndarray, clicks: sp.csr_matrix) -> dict[str, float]:
    """P@1 and recall@10 in percent of int64 (n, K) labels."""
    rows = np.arange(len(found))
    hits = np.asarray(clicks[rows.repeat(K), found.ravel()]).reshape(found.shape) > 0
    recall = hits.sum(1) / np.diff(clicks.indptr)
    return {"P@1": round(100 * float(hits[:, 0].mean()), 2), "R@10": round(100 * float(recall.mean()), 2)}


def measure(kind: str, labels: int, steps: int) -> dict[str, Any]:
    """One kind at one L, in this process."""
    config = KINDS[kind]
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    log = SimulatedLog.of(labels, rng)
    tests = log.queries(TEST_QUERIES, rng)
    batches = np.random.default_rng(1)
    # A step of a small one loads what torch loads at first use.
    Run.of(new_classifier(config, 100, WIDTH)).step(*SimulatedLog.of(100, rng).queries(QUERIES, rng), rng)
    memory = Memory()
    started = time.perf_counter()
    codes = make_codes(config, log.texts, labels, np.random.default_rng(2))
    code_seconds = time.perf_counter() - started
    classifier = new_classifier(config, labels, WIDTH, codes)
    classifier.start_from(torch.from_numpy(log.texts))
    setup = memory.peak()
    run = Run.of(classifier)
    before = quality(served_top_k(run, tests[0]), tests[1])
    # The peak in training is that of what stays and what a step needs, not of making the codes.
    held = memory.begin
    memory.start()
    seconds, pools = [], []
    for _ in range(steps):
        features, clicks = log.queries(QUERIES, batches)
        started = time.perf_counter()
        pools.append(run.step(features, clicks, batches))
        seconds.append(time.perf_counter() - started)
    peak = memory.peak() + memory.begin - held
    result = {
        "kind": kind,
        "labels": labels,
        "heads": list(getattr(classifier, "lengths", [labels])),
        "parameters": sum(p.numel() for p in classifier.parameters()),
        "buffers_mb": round(sum(b.numel() * b.element_size() for b in classifier.buffers()) / 1e6, 2),
        "codes_s": round(code_seconds, 2),
        "setup_peak_mb": round(setup / 1e6, 1),
        "training_peak_mb": round(peak / 1e6, 1),
        "step_ms": round(1e3 * float(np.median(seconds)), 3),
        "step_ms_quartiles": [round(1e3 * float(q), 3) for q in np.percentile(seconds, [25, 75])],
        "pool": round(float(np.mean(pools)), 1),
        "start": before,
        "trained": quality(served_top_k(run, tests[0]), tests[1]),
    }
    if isinstance(classifier, CascadeClassifier):
        plain, by_product = cascade_top_k(run, classifier, tests[0])
        result["cascade"] = quality(plain, tests[1])
        result["cascade_with_group_factor"] = quality(by_product, tests[1])
    return result


def in_child(kind: str, labels: int, steps: int, threads: int) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "bench.mhe", "--one", kind, "--labels", str(labels)]
    command += ["--steps", str(steps), "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _show(rows: list[dict[str, Any]], tasks: dict[str, list[dict[str, Any]]]) -> None:
    header = f"{'kind':<20} {'labels':>9} {'parameters':>11} {'peak, MB':>9} {'step, ms':>9} {'pool':>6}"
    click.echo(header + "   P@1 and R@10: start, trained")
    for row in rows:
        start, trained = row["start"], row["trained"]
        line = f"{row['kind']:<20} {row['labels']:9,} {row['parameters']:11,} {row['training_peak_mb']:9.1f} "
        line += f"{row['step_ms']:9.2f} {row['pool']:6.0f}   {start['P@1']:5.1f} {start['R@10']:5.1f}"
        line += f"   {trained['P@1']:5.1f} {trained['R@10']:5.1f}"
        if "cascade" in row:
            for name in ("cascade", "cascade_with_group_factor"):
                line += f"   ({name.replace('_', ' ')}: {row[name]['P@1']:.1f} {row[name]['R@10']:.1f})"
        click.echo(line)
    for task, results in tasks.items():
        click.echo(f"\n{task.replace('_', ' ')}")
        for row in results:
            click.echo("  " + ", ".join(f"{name} {value}" for name, value in row.items()))


@click.command()
@click.option("--labels", multiple=True, type=click.IntRange(min=2), help="L; may be given several times.")
@click.option("--steps", default=300, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Only these.")
@click.option("--tasks/--no-tasks", default=True, help="Whether to run the two tasks as well.")
@click.option("--task-steps", default=1000, show_default=True, type=click.IntRange(min=1))
@click.option("--one", hidden=True, type=click.Choice(list(KINDS)))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(
    labels: tuple[int, ...],
    steps: int,
    threads: int,
    kinds: tuple[str, ...],
    tasks: bool,
    task_steps: int,
    one: str | None,
    as_json: bool,
) -> None:
    """Parameters, memory, step time and accuracy of table, mhp, mhc and mhs at 10^4, 10^5 and 10^6 labels."""
    torch.set_num_threads(threads)
    if one is not None:
        emit_json(measure(one, labels[0], steps))
        return
    sizes = labels or (10**4, 10**5, 10**6)
    pairs = [(kind, size) for size in sizes for kind in kinds or KINDS]
    rows = []
    with progress("kinds at each size", len(pairs), "runs") as bar:
        for kind, size in pairs:
            rows.append(in_child(kind, size, steps, threads))
            bar.advance(1, note=f"{kind}, {size:,} labels")
    found: dict[str, list[dict[str, Any]]] = {}
    if tasks:
        say("single-label task")
        found["single_label"] = single_label_task(task_steps)
        say("pretraining-style task")
        found["pretraining"] = pretraining_task(task_steps)
    if as_json:
        emit_json({"rows": rows, "tasks": found, "width": WIDTH, "queries": QUERIES, "steps": steps})
    else:
        _show(rows, found)


if __name__ == "__main__":
    main()
