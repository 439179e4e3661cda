"""`bidmatch eval`: quality of a bundle, through the code that serves, or of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import ConfigError
from trainer.data.options import ReadOptions
from trainer.data.options_cli import read_options

if TYPE_CHECKING:
    from bidmatch.evaluation import Quality
    from export.bundle.format import Manifest
    from trainer.data.dataset import Dataset, Interactions

_EPILOG = """\b
Examples:
  bidmatch eval --bundle runs/demo/bundle --data runs/demo/log.tsv
  bidmatch eval --bundle bundles/hd --data data/homedepot --json | jq '.metrics["P@1"]'
  bidmatch eval --bundle bundles/hd --data last_week.tsv --all-queries
  bidmatch eval --bundle bundles/hd --data data/homedepot --no-rescore
  bidmatch eval --checkpoint runs/hd

A log that has no test part is split as the log that the bundle was trained on, so only queries that training
never saw are measured. All figures are percent. Head, torso and tail are phrases with more than 100, 10 to
100 and fewer than 10 training queries.
"""


@click.command(epilog=_EPILOG, short_help="Measure P@k, PSP@k and recall@k of a bundle or a run.")
@click.option(
    "--bundle", type=click.Path(exists=True, path_type=Path), help="Bundle to measure as it serves."
)
@click.option(
    "--checkpoint",
    "run",
    metavar="RUN",
    type=click.Path(exists=True, path_type=Path),
    help="Training run to measure by exact search, on its own held-out queries.",
)
@click.option(
    "--data",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Log, report or dataset folder; may be repeated. Needed with --bundle.",
)
@click.option("--all-queries", is_flag=True, help="Measure every query of the data, not the held-out ones.")
@click.option("--depth", type=click.IntRange(1), default=100, show_default=True, help="Phrases asked for.")
@click.option("--ef", type=click.IntRange(1), help="Wider search than the bundle's own.")
@click.option(
    "--rescore/--no-rescore",
    default=None,
    help="Re-score what the index finds with the bundle's wide vectors; on where it has some.",
)
@click.option(
    "--candidates", type=click.IntRange(1), help="Phrases to re-score, if not as many as the bundle says."
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, help="Calls at once; 0 (the default): all cores."
)
@click.option("--propensity-a", type=float, help="A of PSP@k; default: the bundle's or run's.")
@click.option("--propensity-b", type=float, help="B of PSP@k; likewise.")
@read_options
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_context
def command(
    context: click.Context,
    bundle: Path | None,
    run: Path | None,
    data: tuple[Path, ...],
    all_queries: bool,
    depth: int,
    ef: int | None,
    rescore: bool | None,
    candidates: int | None,
    threads: int,
    propensity_a: float | None,
    propensity_b: float | None,
    read_options: ReadOptions,
    as_json: bool,
) -> None:
    """Measure a bundle on DATA through the code that serves, or a training run on its held-out queries."""
    if (bundle is None) == (run is None):
        raise ConfigError("give one of --bundle and --checkpoint")
    propensity = (propensity_a, propensity_b)
    if run is not None:
        if data:
            raise ConfigError("a run is measured on its own held-out queries; --data goes with --bundle")
        _eval_run(run, propensity, as_json)
        return
    if not data:
        raise ConfigError("--bundle needs --data", hint="Give the log or dataset folder to measure on.")
    assert bundle is not None
    source = click.core.ParameterSource.COMMANDLINE
    own_split = {n for n in ("test_share", "split_seed") if context.get_parameter_source(n) == source}
    report, quality = evaluate_bundle(
        bundle,
        list(data),
        read_options,
        own_split,
        all_queries,
        depth,
        ef,
        threads,
        propensity,
        rescore=rescore,
        candidates=candidates,
    )
    if as_json:
        emit_json(report | quality.model_dump())
        return
    _show([(f"Bundle {report['bundle_id']}: percent on {report['queries']:,} queries", quality)])


def evaluate_bundle(
    bundle: Path,
    data: list[Path],
    options: ReadOptions,
    own_split: set[str],
    all_queries: bool,
    depth: int,
    ef: int | None,
    threads: int,
    propensity: tuple[float | None, float | None],
    *,
    rescore: bool | None = None,
    candidates: int | None = None,
) -> tuple[dict[str, Any], Quality]:
    """What was measured and how, and the figures.

    Args:
        bundle: bundle folder.
        data: log files or dataset folders.
        options: how to read them.
        own_split: fields of `options` that count; the other split settings are the bundle's.
        all_queries: whether to measure every query.
        depth: phrases asked for.
        ef: wider search than the bundle's own, or None.
        threads: calls at once; 0 for all cores.
        propensity: A and B, each None for the bundle's.
        rescore: whether to re-score with the bundle's wide vectors; None: where it has some.
        candidates: phrases to re-score, or None for as many as the bundle says.
    """
    from bidmatch.evaluation import Popularity, measure, query_counts, rank_all, rows_in
    from export.bundle.read import read_manifest
    from service.engine import Engine, EngineSettings
    from service.settings import usable_cpus
    from trainer.data.read import read_dataset, report_lines

    manifest = read_manifest(bundle)
    dataset = read_dataset(data, _split_of(manifest, options, own_split))
    for line in report_lines(dataset.report, dataset.split):
        say(line)
    same_data = dataset.report.fingerprint == manifest.data.fingerprint
    if not same_data:
        say("warning: these are not the data the bundle was trained on; queries of it may be among them")
    measured, which = _queries(dataset, all_queries)
    if len(measured) == 0:
        raise ConfigError(
            "no query of the data is held out", hint="Give --all-queries to measure all of them."
        )
    say(f"measuring {which}: {len(measured):,} queries")

    # The log's clicks judge the model; what advertisers ruled out is no mistake of the model's.
    settings = EngineSettings(ef=ef, rescore=rescore, candidates=candidates, honour_match_types=False)
    engine = Engine.load(bundle, settings)
    if engine.candidates:
        say(f"re-scoring {engine.depth(depth)} candidates with the bundle's wide vectors")
    phrases = engine.bundle.phrases
    label_of = rows_in(phrases, dataset.phrases)
    counts, n_train = query_counts(dataset.train), len(dataset.train)
    if which != "held-out queries" and "train_clicks" in phrases.column_names:
        counts = np.zeros(len(dataset.phrases), dtype=np.int64)
        known = label_of >= 0
        np.add.at(counts, label_of[known], phrases["train_clicks"].to_numpy()[known])
        n_train = manifest.counts.train_queries
    missing = np.setdiff1d(np.arange(len(dataset.phrases)), label_of)
    lost = int(np.isin(measured.clicks.indices, missing).sum())
    if len(missing):
        say(
            f"{len(missing):,} of the data's {len(dataset.phrases):,} phrases are not in the bundle; "
            f"they are in {lost:,} of {measured.clicks.nnz:,} pairs, which count as misses"
        )

    def match(queries: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        found = engine.match(queries, k)
        return found.offsets, found.rows

    a, b = _constants(propensity, (manifest.quality.propensity["A"], manifest.quality.propensity["B"]))
    topk = rank_all(
        measured.queries.to_pylist(), match, label_of, depth, threads or usable_cpus(), measured.filtered
    )
    report = {
        "bundle": str(bundle),
        "bundle_id": manifest.bundle_id,
        "encoder": manifest.encoder.precision,
        "dim": manifest.dim,
        "ef": ef or manifest.index.ef,
        "candidates": engine.depth(depth) if engine.candidates else 0,
        "wide_dim": manifest.rescore.dim if engine.candidates and manifest.rescore else 0,
        "depth": depth,
        "data": [str(path) for path in data],
        "fingerprint": dataset.report.fingerprint,
        "trained_on_these_data": same_data,
        "split": dataset.split.model_dump(),
        "measured": which,
        "queries": len(measured),
        "pairs": int(measured.clicks.nnz),
        "filter_pairs": _filter_pairs(measured),
        "phrases": len(phrases),
        "phrases_not_in_bundle": len(missing),
        "pairs_not_in_bundle": lost,
        "propensity": {"A": a, "B": b, "training_queries": n_train},
    }
    say(f"PSP with A = {a:g}, B = {b:g} over {n_train:,} training queries")
    return report, measure(topk, measured.clicks, Popularity(counts, n_train, a, b))


def _split_of(manifest: Manifest, options: ReadOptions, own: set[str]) -> ReadOptions:
    """The reading options, with the bundle's split where the user named none."""
    split = manifest.data.split
    recorded = {"test_share": split.share, "split_seed": split.seed}
    return options.model_copy(update={name: value for name, value in recorded.items() if name not in own})


def _queries(dataset: Dataset, all_queries: bool) -> tuple[Interactions, str]:
    from trainer.data.read import join

    if all_queries:
        return join(dataset.train, dataset.test), "all queries"
    if dataset.split.kind != "given" and dataset.split.share == 0:
        # Trained on data with a test part of their own: a lone file beside them is taken as such a part.
        return dataset.train, "all queries (the data have no test part, and the bundle's was given)"
    return dataset.test, "held-out queries"


def _filter_pairs(measured: Interactions) -> int:
    return 0 if measured.filtered is None else int(measured.filtered.nnz)


def _constants(
    given: tuple[float | None, float | None], otherwise: tuple[float, float]
) -> tuple[float, float]:
    a, b = (
        chosen if chosen is not None else default for chosen, default in zip(given, otherwise, strict=True)
    )
    return a, b


def _eval_run(run: Path, propensity: tuple[float | None, float | None], as_json: bool) -> None:
    import pyarrow as pa
    import torch

    from bidmatch.base.text import key
    from bidmatch.evaluation import Popularity, measure, query_counts
    from trainer.checkpoint import load_run
    from trainer.corpus import TokenSource
    from trainer.embed import embed
    from trainer.evaluate import rankings, served_view
    from trainer.model import HeadVectors
    from trainer.tokenise import tokenise_all

    trained = load_run(run)
    if len(trained.test) == 0:
        raise ConfigError(f"{run} has no held-out queries", hint="Train with --test-share above 0.")
    cpu = torch.device("cpu")

    def vectors(texts: pa.Array, what: str) -> list[HeadVectors]:
        source = TokenSource(tokenise_all(trained.tokenizer, texts, what))
        return embed(trained.model, source, cpu, f"encoding {what}", wide=True)

    def label_vectors() -> list[HeadVectors]:
        if trained.label_vectors is not None:
            kept = [torch.from_numpy(phi_d) for phi_d in trained.label_vectors]
            return [HeadVectors(phi_d, phi_d[:, :0]) for phi_d in kept]
        texts = [key(text) for text in trained.phrases["text"].to_pylist()]
        return vectors(pa.array(texts, pa.large_string()), "phrases")

    psi = [table for table in (trained.table, trained.wide_table) if table is not None and table.shape[1]]
    found = rankings(
        vectors(trained.test.queries, "queries"),
        label_vectors(),
        [torch.from_numpy(t) for t in psi],
        trained.test.filtered,
    )
    a, b = _constants(propensity, (trained.config.propensity_a, trained.config.propensity_b))
    n_train = trained.info["split"]["train_queries"]
    # As with a bundle, frequencies are those of the whole training part, validation queries included.
    counts = trained.phrases["train_clicks"].to_numpy() + query_counts(trained.validation)
    popularity = Popularity(counts, n_train, a, b)
    views = {view: measure(topk, trained.test.clicks, popularity) for view, topk in found.items()}
    say(f"PSP with A = {a:g}, B = {b:g} over {n_train:,} training queries")
    if as_json:
        report = {
            "run": str(run),
            "model_id": trained.model_id,
            "queries": len(trained.test),
            "filter_pairs": _filter_pairs(trained.test),
            "phrases": len(trained.phrases),
            "propensity": {"A": a, "B": b, "training_queries": n_train},
            "metrics": views[served_view(views)].metrics,
        }
        emit_json(report | {"views": {view: quality.model_dump() for view, quality in views.items()}})
        return
    _show(
        [
            (f"{view.replace('_', ' ')}: percent on {len(trained.test):,} queries, exact search", quality)
            for view, quality in views.items()
        ]
    )


def _show(tables: list[tuple[str, Quality]]) -> None:
    from bidmatch.evaluation import print_tables, quality_table

    print_tables([quality_table(title, quality) for title, quality in tables])
