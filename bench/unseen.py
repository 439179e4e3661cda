"""Phrases never seen in training: which vector finds them best?

    python -m bench.unseen --data DIR [--share 0.1] [--preset bag] [--set key=value ...] [--json]

A share of the labels is held out: training knows neither their clicks nor their texts. Then they join the
others, each with a vector made of its text alone, in one of three ways, and the test queries that belong to
at least one of them rank all labels, by exact search:

- `both heads of its text`: [Φ_D(z) ⊕ N(Φ_C(z))];
- `dual encoder alone`: Φ_D(z), for all labels and queries;
- `nearest trained rows`: [Φ_D(z) ⊕ N(mean of ψ_l over the trained labels nearest by Φ_D)].

Recall@k counts the held-out labels only; that of trained labels is measured beside it on the queries that
have some, for a way that finds new phrases at the cost of the known is none.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import scipy.sparse as sp
import torch

from bidmatch.base.console import emit_json, say
from trainer.checkpoint import TrainedRun, load_run
from trainer.corpus import keys_of, token_source
from trainer.data.dataset import Dataset, Interactions
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset
from trainer.embed import embed
from trainer.metrics import most_filtered, recall_at_k, without_filtered
from trainer.mining import exact_top_k
from trainer.model import normalised
from trainer.run import run_training
from trainer.settings import make_config

KS = (10, 100)
NEAREST = 5


def without_labels(dataset: Dataset, held: np.ndarray) -> Dataset:
    """The data set as if the labels `held`, bool (L,), did not exist; queries left without a label go."""

    def part(interactions: Interactions) -> Interactions:
        clicks = interactions.clicks[:, ~held]
        filtered = None if interactions.filtered is None else interactions.filtered[:, ~held]
        rows = np.flatnonzero(np.diff(clicks.indptr))
        return Interactions(interactions.queries, clicks, filtered).take(rows)

    phrases = dataset.phrases.filter(pa.array(~held))
    return dataclasses.replace(dataset, phrases=phrases, train=part(dataset.train), test=part(dataset.test))


def rankings(run: TrainedRun, dataset: Dataset, held: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Way of making a new phrase's vector -> the 100 best labels of the test queries `rows`, int64."""
    cpu = torch.device("cpu")
    labels = token_source(run.tokenizer, keys_of(dataset.phrases), "phrases")
    queries = token_source(run.tokenizer, dataset.test.queries.take(pa.array(rows)), "test queries")
    (z,) = embed(run.model, labels, cpu, "encoding phrases")
    (x,) = embed(run.model, queries, cpu, "encoding test queries")
    trained = normalised(torch.from_numpy(run.table.copy()))
    known, new = torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))

    second = normalised(z.phi_c)
    from_text = second.clone()
    from_text[known] = trained
    near = torch.from_numpy(exact_top_k(z.phi_d[new], z.phi_d[known], NEAREST))
    from_near = from_text.clone()
    from_near[new] = normalised(trained[near].mean(1))
    query = torch.cat([x.phi_d, normalised(x.phi_c)], 1)
    filtered = None if dataset.test.filtered is None else dataset.test.filtered[rows]
    depth = max(KS) + most_filtered(filtered)
    ways = {
        "both heads of its text": (query, torch.cat([z.phi_d, from_text], 1)),
        "dual encoder alone": (x.phi_d, z.phi_d),
        "nearest trained rows": (query, torch.cat([z.phi_d, from_near], 1)),
    }
    return {way: without_filtered(exact_top_k(*pair, depth), filtered, max(KS)) for way, pair in ways.items()}


def recalls(topk: np.ndarray, truth: sp.csr_matrix, counted: np.ndarray) -> dict[str, float]:
    """recall@k of the labels `counted`, bool (L,), over the queries that have one of them."""
    wanted = sp.csr_matrix(truth @ sp.diags(counted.astype(np.float32)))
    wanted.eliminate_zeros()
    some = np.flatnonzero(np.diff(wanted.indptr))
    return {f"recall@{k}": recall_at_k(topk[some], wanted[some], k) for k in KS}


@click.command()
@click.option("--data", multiple=True, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--share", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.1)
@click.option("--preset", default="bag", show_default=True)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE")
@click.option("--seed", default=0, show_default=True, help="Which labels are held out.")
@click.option("--run", type=click.Path(path_type=Path), help="Run folder to keep; else a temporary one.")
@click.option("--json", "as_json", is_flag=True)
def main(
    data: tuple[Path, ...],
    share: float,
    preset: str,
    assignments: tuple[str, ...],
    seed: int,
    run: Path | None,
    as_json: bool,
) -> None:
    """Hold labels out of training and see what finds them."""
    dataset = read_dataset(list(data), ReadOptions())
    held = np.random.default_rng(seed).random(len(dataset.phrases)) < share
    config = make_config(preset, list(assignments))
    with tempfile.TemporaryDirectory() as scratch:
        folder = run or Path(scratch) / "run"
        run_training(without_labels(dataset, held), config, folder)
        trained = load_run(folder)
        truth = dataset.test.clicks
        rows = np.arange(len(dataset.test))
        found = rankings(trained, dataset, held, rows)
    table = {
        way: {"held_out": recalls(topk, truth, held), "trained": recalls(topk, truth, ~held)}
        for way, topk in found.items()
    }
    result = {
        "labels": len(held),
        "held_out_labels": int(held.sum()),
        "queries_with_held_out": int((np.diff((truth[:, held]).indptr) > 0).sum()),
        "dim": config.dim,
        "recall": table,
    }
    if as_json:
        emit_json(result)
        return
    say(f"{result['held_out_labels']:,} of {result['labels']:,} labels held out; width {config.dim}")
    for way, figures in table.items():
        parts = [
            f"{name} {measure} {value:.1f}"
            for name, values in figures.items()
            for measure, value in values.items()
        ]
        say(f"{way:24} " + ", ".join(parts))


if __name__ == "__main__":
    main()
