"""What Gandalf's targets cost: peak memory and time of building them at 10^4, 10^5 and 10^6 labels.

    python -m bench.gandalf [--labels L]... [--graph KIND]... [--most K] [--json]

The log is simulated: as many queries as labels, labels by Zipf's law, clicks a query by a power law up to
thousands, so that most labels have fewer than five clicks and a few queries make most of the pairs. Labels of
a query are drawn independently, which spreads its pairs over more labels than a real log's topics would. Each
case is a process of its own; its peak memory is the kernel's `ru_maxrss`, so interpreter, libraries and the
simulated log are in it (`before_mb` is what they had taken), as is the joined training set.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import resource
import subprocess
import sys
import time

import click
import numpy as np
import orjson
import scipy.sparse as sp

from bidmatch.base.console import emit_json, progress
from trainer.config import GandalfConfig

LIMIT_MB = 4096
GRAPHS = ("conditional", "random_walk", "glas", "self")


def simulated_clicks(labels: int, exponent: float, largest: int, seed: int) -> sp.csr_matrix:
    """Clicks, CSR (labels, labels) float32: query degrees ~ d^-exponent up to `largest`, labels ~ 1/rank."""
    rng = np.random.default_rng(seed)
    degrees = np.arange(1, min(largest, labels) + 1)
    share = degrees ** -float(exponent)
    degree = rng.choice(degrees, size=labels, p=share / share.sum())
    # The largest queries are there at every size of the log.
    degree[:10] = degrees[-1]
    popularity = np.cumsum(1.0 / np.arange(1, labels + 1))
    clicked = np.searchsorted(popularity, rng.random(int(degree.sum())) * popularity[-1])
    ends = np.concatenate([[0], np.cumsum(degree)])
    clicks = sp.csr_matrix((np.ones(len(clicked), np.float32), clicked, ends), shape=(labels, labels))
    clicks.sum_duplicates()
    return clicks


def peak_mb() -> float:
    """Most memory that this process ever held, MB (kernel's figure, in KiB on Linux and bytes on macOS)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def measure(labels: int, graph: str, most: int, exponent: float, largest: int, seed: int) -> dict:
    """One case, in this process."""
    from trainer.gandalf.augment import augment
    from trainer.gandalf.targets import gandalf_pairs

    clicks = simulated_clicks(labels, exponent, largest, seed)
    degree, frequency = np.diff(clicks.indptr), np.bincount(clicks.indices, minlength=labels)
    before = peak_mb()
    started = time.perf_counter()
    config = GandalfConfig.model_validate({"enabled": True, "graph": graph, "most": most})
    pairs = gandalf_pairs(clicks, config, np.random.default_rng(seed))
    seconds = time.perf_counter() - started
    joined = augment(clicks, pairs)
    return {
        "labels": labels,
        "graph": graph,
        "clicks": int(clicks.nnz),
        "labels_below_5_clicks": round(float((frequency < 5).mean()), 4),
        "most_clicked_label": int(frequency.max()),
        "largest_query": int(degree.max()),
        "co_occurrences": int((degree.astype(np.int64) ** 2).sum()),
        "targets": int(pairs.targets.nnz),
        "most_targets": int(np.diff(pairs.targets.indptr).max()),
        "training_pairs": int(joined.nnz),
        "seconds": round(seconds, 2),
        "before_mb": round(before, 1),
        "peak_mb": round(peak_mb(), 1),
    }


@click.command()
@click.option("--labels", multiple=True, type=click.IntRange(10), default=(10_000, 100_000, 1_000_000))
@click.option("--graph", "graphs", multiple=True, type=click.Choice(GRAPHS), default=GRAPHS)
@click.option("--most", default=GandalfConfig().most, show_default=True, help="gandalf.most; 0: all targets.")
@click.option("--exponent", default=2.2, show_default=True, help="Of the power law of clicks a query.")
@click.option("--largest", default=5000, show_default=True, help="Clicks of the largest queries.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.option("--one", is_flag=True, hidden=True, help="Measure the one case given, in this process.")
def main(
    labels: tuple[int, ...],
    graphs: tuple[str, ...],
    most: int,
    exponent: float,
    largest: int,
    seed: int,
    as_json: bool,
    one: bool,
) -> None:
    """Peak memory and seconds of Gandalf's targets; fails where a case takes more than 4 GB."""
    if one:
        emit_json(measure(labels[0], graphs[0], most, exponent, largest, seed))
        return
    cases = [(size, graph) for size in labels for graph in graphs]
    rows = []
    with progress("label graphs", len(cases), "cases") as bar:
        for size, graph in cases:
            options = [f"--labels={size}", f"--graph={graph}", f"--most={most}", f"--exponent={exponent}"]
            command = [sys.executable, "-m", "bench.gandalf", "--one", *options]
            command += [f"--largest={largest}", f"--seed={seed}"]
            answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            rows.append(orjson.loads(answer.stdout))
            bar.advance()
    fits = all(row["peak_mb"] <= LIMIT_MB for row in rows)
    if as_json:
        emit_json({"rows": rows, "cpu_count": os.cpu_count(), "limit_mb": LIMIT_MB, "within_limit": fits})
    else:
        click.echo(
            f"{'labels':>10} {'graph':>12} {'clicks':>11} {'targets':>12} {'seconds':>9} {'peak, MB':>10}"
        )
        for row in rows:
            click.echo(
                f"{row['labels']:10,} {row['graph']:>12} {row['clicks']:11,} {row['targets']:12,} "
                f"{row['seconds']:9.1f} {row['peak_mb']:10.0f}"
            )
    if not fits:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
