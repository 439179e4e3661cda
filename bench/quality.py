"""Quality on a data set: lexical baselines, other systems' rankings, and bundles as they serve, in one table.

    python -m bench.quality --data DIR [--bundle BUNDLE ...] [--ranking NAME=FILE.npz ...] [--json]

Every row of the first table of bench/quality.md comes from this command. A bundle is measured through the
code that serves: its 8-bit encoder, its index, and where it has wide vectors twice, with re-scoring (as it
serves) and without. Rankings are those of `python -m bench.peers`. Fitting and matching of the baselines are
timed on one thread; a bundle is timed one query a call, on one thread, for as many phrases as are ranked.
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
from bidmatch.base.errors import BidmatchError, InputError
from bidmatch.base.text import key
from bidmatch.commands.eval import evaluate_bundle
from bidmatch.evaluation import Popularity, Quality, measure, query_counts
from service.engine import Engine, EngineSettings
from trainer.baselines import fit_lexical
from trainer.compare.rankings import read_ranking
from trainer.data.dataset import Dataset
from trainer.data.options import ReadOptions
from trainer.data.read import read_dataset, report_lines
from trainer.metrics import most_filtered, without_filtered

NAMES = {
    "tfidf": "TF-IDF, query to phrase text",
    "nearest": "TF-IDF, 20 nearest training queries",
    "hybrid": "sum of these two, each over its maximum",
}
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "recall@10", "recall@100")
DEPTH = 100
TIMED_QUERIES = 1000


def lexical_rows(dataset: Dataset, popularity: Popularity) -> list[dict]:
    queries, filtered = dataset.test.queries.to_pylist(), dataset.filtered
    started = time.perf_counter()
    labels = [key(text) for text in dataset.phrases["text"].to_pylist()]
    matcher = fit_lexical(dataset.train.queries.to_pylist(), labels, dataset.train.clicks)
    fitted = time.perf_counter() - started
    started = time.perf_counter()
    ranked = matcher.rank(queries, DEPTH + most_filtered(filtered))
    each = (time.perf_counter() - started) / max(len(queries), 1)
    return [
        # The three rankings are made in one pass, so its time is the hybrid's.
        row(
            NAMES[name],
            measure(without_filtered(topk, filtered, DEPTH), dataset.test.clicks, popularity),
            fitted,
            1e3 * each if name == "hybrid" else None,
        )
        for name, topk in ranked.items()
    ]


def ranking_row(name: str, file: Path, dataset: Dataset, popularity: Popularity) -> dict:
    found = read_ranking(file, len(dataset.test), len(dataset.phrases))
    topk = without_filtered(found.topk, dataset.filtered, DEPTH)
    with np.load(file) as stored:
        if "fingerprint" in stored and str(stored["fingerprint"]) != dataset.report.fingerprint:
            raise InputError("is a ranking of other data (fingerprint differs)", file=file)
        each = float(stored["ms_per_query"]) if "ms_per_query" in stored else None
    return row(name, measure(topk, dataset.test.clicks, popularity), found.seconds, each)


def bundle_rows(bundle: Path, data: Path, queries: list[str], a: float, b: float) -> list[dict]:
    """The bundle as it serves, and where it re-scores also without."""
    rows = []
    for rescore in (None, False):
        report, quality = evaluate_bundle(
            bundle,
            [data],
            ReadOptions(),
            set(),
            False,
            DEPTH,
            None,
            1,
            propensity=(a, b),
            rescore=rescore,
        )
        engine = Engine.load(bundle, EngineSettings(rescore=rescore, honour_match_types=False))
        seconds = []
        for query in queries[:TIMED_QUERIES]:
            started = time.perf_counter()
            engine.match([query], DEPTH)
            seconds.append(time.perf_counter() - started)
        wide = (
            f", top {report['candidates']} re-scored at {report['wide_dim']}-d"
            if report["candidates"]
            else ""
        )
        name = f"bidmatch {report['dim']}-d{wide}, {report['encoder']} encoder ({report['bundle_id']})"
        rows.append(row(name, quality, None, 1e3 * float(np.median(seconds))))
        if not report["candidates"]:
            break
    return rows


def named_file(given: str) -> tuple[str, Path]:
    """NAME and FILE of `NAME=FILE`."""
    name, equals, file = given.partition("=")
    if not (name and equals and Path(file).is_file()):
        raise click.BadParameter(f"{given}: expected NAME=FILE.npz")
    return name, Path(file)


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
@click.option("--ranking", "rankings", multiple=True, metavar="NAME=FILE", help="Of another system.")
@click.option("--propensity-a", default=0.55, show_default=True)
@click.option("--propensity-b", default=1.5, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    data: Path,
    bundles: tuple[Path, ...],
    rankings: tuple[str, ...],
    propensity_a: float,
    propensity_b: float,
    as_json: bool,
) -> None:
    """Print the table, or with --json all figures."""
    files = [named_file(given) for given in rankings]
    dataset = read_dataset([data], ReadOptions())
    for line in report_lines(dataset.report, dataset.split):
        say(line)
    popularity = Popularity(query_counts(dataset.train), len(dataset.train), propensity_a, propensity_b)
    queries = dataset.test.queries.to_pylist()
    rows = []
    for bundle in bundles:
        rows += bundle_rows(bundle, data, queries, propensity_a, propensity_b)
    rows += lexical_rows(dataset, popularity)
    rows += [ranking_row(name, file, dataset, popularity) for name, file in files]
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
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
