"""Quality on a data set: the lexical baselines, and bundles through the code that serves, in one table.

    python -m bench.quality --data DIR [--bundle BUNDLE ...] [--json]

The rows of bench/quality.md that this project can re-run, on data with a test part of their own. Fitting and
matching of the baselines are timed on one thread; a bundle is timed one query a call, on one thread.

"""

from __future__ import annotations

import os

# Before numpy is imported: the baselines are quoted for one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from pathlib import Path

import click
import numpy as np

from bidmatch.base.console import emit_json, say
from bidmatch.base.text import key
from bidmatch.commands.eval import evaluate_bundle
from bidmatch.evaluation import Popularity, Quality, measure, query_counts
from service.engine import Engine
from trainer.baselines import fit_lexical
from trainer.data.dataset import Dataset
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset, report_lines

NAMES = {
    "tfidf": "TF-IDF, query to phrase text",
    "nearest": "TF-IDF, 20 nearest training queries",
    "hybrid": "sum of these two, each over its maximum",
}
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "recall@10", "recall@100")
DEPTH = 100
TIMED_QUERIES = 1000


def lexical_rows(dataset: Dataset, a: float, b: float) -> list[dict]:
    popularity = Popularity(query_counts(dataset.train), len(dataset.train), a, b)
    queries = dataset.test.queries.to_pylist()
    started = time.perf_counter()
    labels = [key(text) for text in dataset.phrases["text"].to_pylist()]
    matcher = fit_lexical(dataset.train.queries.to_pylist(), labels, dataset.train.clicks)
    fitted = time.perf_counter() - started
    started = time.perf_counter()
    ranked = matcher.rank(queries, DEPTH)
    each = (time.perf_counter() - started) / max(len(queries), 1)
    return [
        # The three rankings are made in one pass, so its time is the hybrid's.
        row(
            NAMES[name],
            measure(topk, dataset.test.clicks, popularity),
            fitted,
            1e3 * each if name == "hybrid" else None,
        )
        for name, topk in ranked.items()
    ]


def bundle_row(bundle: Path, data: Path, queries: list[str], a: float, b: float) -> dict:
    report, quality = evaluate_bundle(
        bundle, [data], ReadOptions(), set(), False, DEPTH, None, 1, propensity=(a, b)
    )
    engine = Engine.load(bundle)
    seconds = []
    for query in queries[:TIMED_QUERIES]:
        started = time.perf_counter()
        engine.match([query], DEPTH)
        seconds.append(time.perf_counter() - started)
    name = f"bidmatch {report['dim']}-d, {report['encoder']} encoder, HNSW (bundle {report['bundle_id']})"
    return row(name, quality, None, 1e3 * float(np.median(seconds)))


def row(name: str, quality: Quality, fit_s: float | None, ms_per_query: float | None) -> dict:
    return {
        "method": name,
        "metrics": quality.metrics,
        "by_frequency": quality.by_frequency,
        "fit_s": fit_s,
        "ms_per_query": ms_per_query,
    }


def markdown(rows: list[dict]) -> str:
    lines = [f"| method | {' | '.join(COLUMNS)} | fit s | ms/query |", "|" + "-|" * (len(COLUMNS) + 3)]
    for one in rows:
        figures = [f"{one['metrics'][name]:.1f}" for name in COLUMNS]
        timings = ["-" if one[name] is None else f"{one[name]:.1f}" for name in ("fit_s", "ms_per_query")]
        lines.append(f"| {one['method']} | {' | '.join(figures + timings)} |")
    return "\n".join(lines)


@click.command()
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path), help="Dataset or log.")
@click.option("--bundle", "bundles", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--propensity-a", default=0.55, show_default=True)
@click.option("--propensity-b", default=1.5, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    data: Path, bundles: tuple[Path, ...], propensity_a: float, propensity_b: float, as_json: bool
) -> None:
    """Print the table, or with --json all figures."""
    dataset = read_dataset([data], ReadOptions())
    for line in report_lines(dataset.report, dataset.split):
        say(line)
    rows = lexical_rows(dataset, propensity_a, propensity_b)
    queries = dataset.test.queries.to_pylist()
    rows += [bundle_row(bundle, data, queries, propensity_a, propensity_b) for bundle in bundles]
    if as_json:
        emit_json(
            {
                "data": str(data),
                "queries": len(queries),
                "fingerprint": dataset.report.fingerprint,
                "propensity": {"A": propensity_a, "B": propensity_b},
                "rows": rows,
            }
        )
    else:
        click.echo(markdown(rows))


if __name__ == "__main__":
    main()
