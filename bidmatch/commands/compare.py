"""`bidmatch compare`: several methods on one log, over several seeds, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import BidmatchError, ConfigError
from bidmatch.base.files import locked
from bidmatch.base.processes import process_count
from trainer.data.options import ReadOptions
from trainer.data.options_cli import read_options

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.compare.rankings import Ranking
    from trainer.compare.records import Comparison, Row
    from trainer.data.dataset import Dataset

_SHOWN = ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "recall@10", "recall@100")
_EPILOG = """\b
Examples:
  bidmatch compare --data clicks.tsv --out cmp --base bag --presets unidec,depsl,ngame,gandalf --lexical
  bidmatch compare --data clicks.tsv --out cmp --presets "bag,easy=bag:batch.hard_negatives=0;epochs=8"
  bidmatch compare --data clicks.tsv --out cmp --presets bag --ranking pecos=pecos.npz --ranking tree=tree.npz

A row is [NAME=]PRESET[:KEY=VALUE;KEY=VALUE...]; PRESET is a shipped name or a YAML file. docs/presets.md says
what the shipped ones are. The same command again takes finished runs as they are and goes on with stopped
ones.
"""


@click.command(epilog=_EPILOG, short_help="Train several methods on one log and compare them in one table.")
@click.option(
    "--data",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Click log, ads report, or folder; may be repeated.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder for the runs and the comparison."
)
@click.option(
    "--presets",
    multiple=True,
    metavar="ROW,ROW,...",
    help="What to train, the row that others are held against first; may be repeated.",
)
@click.option(
    "--base", metavar="PRESET", help="Encoder preset that all rows stand on, so that budgets are equal."
)
@click.option("--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Runs of each row.")
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change one setting of all rows."
)
@click.option(
    "--ranking",
    "rankings",
    multiple=True,
    metavar="NAME=FILE.npz",
    help="Row of another system's answers to the held-out queries; may be repeated.",
)
@click.option("--lexical", is_flag=True, help="Add the TF-IDF baselines.")
@click.option(
    "--depth",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Phrases of a baseline's or another system's answer that count.",
)
@click.option("--overwrite", is_flag=True, help="Delete the rows' runs that are in --out and begin anew.")
@read_options
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON on stdout.")
@click.pass_context
def command(
    context: click.Context,
    data: tuple[Path, ...],
    out: Path,
    presets: tuple[str, ...],
    base: str | None,
    seeds: int,
    assignments: tuple[str, ...],
    rankings: tuple[str, ...],
    lexical: bool,
    depth: int,
    overwrite: bool,
    read_options: ReadOptions,
    as_json: bool,
) -> None:
    """Train several methods on one log and compare them in one table: compare.html and compare.json."""
    from trainer.compare.items import parse_items, refuse_equal_names
    from trainer.settings import make_config

    if process_count() > 1:
        raise ConfigError(
            "a comparison trains one run after another in one process",
            hint="Leave torchrun out; `bidmatch train` takes several processes.",
        )
    items = parse_items(presets, base, assignments)
    files = [_named_file(given) for given in rankings]
    baselines = ["tfidf", "nearest", "hybrid"] if lexical else []
    refuse_equal_names([*(item.name for item in items), *(name for name, _ in files), *baselines])
    if not (items or files or lexical):
        raise ConfigError(
            "there is nothing to compare", hint="Name rows with --presets, --ranking or --lexical."
        )
    _check_folder(out)
    config = items[0].config if items else make_config(base or "bag", assignments)

    # Imported before the log is read, so that a missing package is said at once.
    from trainer.compare.rankings import read_ranking
    from trainer.compare.rows import check_rows, finished_runs, train_rows, trained_rows
    from trainer.compare.write import write_html
    from trainer.data.read import read_dataset, report_lines

    dataset = read_dataset(list(data), read_options)
    for line in report_lines(dataset.report, dataset.split):
        say(line)
    if len(dataset.test) == 0:
        raise ConfigError("no query of the data is held out", hint="Give --test-share above 0.")
    n_test, n_labels = dataset.test.clicks.shape
    answers = [(name, file, read_ranking(file, n_test, n_labels)) for name, file in files]
    out.mkdir(parents=True, exist_ok=True)
    context.with_resource(locked(out / ".lock", f"another comparison is being made in {out}"))
    if not overwrite:
        _check_table(out, dataset)
        check_rows(dataset, items, range(seeds), out)

    empty = _empty(dataset, config.propensity_a, config.propensity_b).model_copy(
        update={
            "seeds": list(range(seeds)) if items else [],
            "base": base,
            "assignments": list(assignments),
            "depth": depth,
        }
    )
    elsewhere = _measured(dataset, answers, lexical, empty)
    # What is there already is in the table from its first writing on: a kill costs no finished row.
    known = {} if overwrite else finished_runs(dataset, items, range(seeds), out)
    comparison = _write(out, empty, [*trained_rows(items, range(seeds), known), *elsewhere])
    for runs in train_rows(dataset, items, range(seeds), out, known, overwrite=overwrite):
        comparison = _write(out, empty, [*trained_rows(items, range(seeds), runs), *elsewhere])
    write_html(out, comparison)

    if as_json:
        emit_json(comparison.model_dump())
    else:
        from bidmatch.evaluation import print_tables

        print_tables([_table(comparison)])
        click.echo(f"comparison: {out / 'compare.html'}, {out / 'compare.json'}")
    failed = [f"{row.name}, seed {seed}" for row in comparison.rows for seed, _ in row.errors]
    if failed:
        raise BidmatchError(
            f"{len(failed)} of {len(items) * seeds} runs failed: {'; '.join(failed)}",
            hint=f"{out / 'compare.html'} says why. The same command again takes the others as they are.",
        )


def _named_file(given: str) -> tuple[str, Path]:
    from trainer.compare.items import checked_name

    name, named, file = given.partition("=")
    if not named or not name.strip() or not file:
        raise ConfigError(f"--ranking {given}: expected NAME=FILE.npz")
    return checked_name(name.strip()), Path(file)


def _check_folder(out: Path) -> None:
    """Refuse to put runs among the files of something else; compare.json marks a folder of ours."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, not a folder", hint="Name a new folder with --out.")
    names = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    if names - {".lock"} and "compare.json" not in names:
        raise ConfigError(
            f"{out} holds files of something else, which a comparison would mix with",
            hint="Name a new folder.",
        )


def _check_table(out: Path, dataset: Dataset) -> None:
    """Refuse to write over the comparison of other data; one that can't be read compares nothing."""
    import orjson

    try:
        data = orjson.loads((out / "compare.json").read_bytes())["data"]
        there = (data["fingerprint"], data["split"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if there != (dataset.report.fingerprint, dataset.split.model_dump()):
        raise ConfigError(
            f"{out / 'compare.json'} is a comparison on other data (fingerprint or split differs)",
            hint="Name another --out folder; --overwrite deletes the runs of these rows and the table.",
        )


def _empty(dataset: Dataset, a: float, b: float) -> Comparison:
    from bidmatch import __version__
    from trainer.compare.records import Comparison, Data

    return Comparison(
        created="",
        bidmatch=__version__,
        data=Data(
            format=dataset.report.format,
            files=dataset.report.files,
            fingerprint=dataset.report.fingerprint,
            split=dataset.split.model_dump(),
            phrases=len(dataset.phrases),
            train_queries=len(dataset.train),
            test_queries=len(dataset.test),
            test_pairs=int(dataset.test.clicks.nnz),
        ),
        seeds=[],
        base=None,
        assignments=[],
        depth=0,
        propensity={"A": a, "B": b},
    )


def _measured(
    dataset: Dataset, answers: list[tuple[str, Path, Ranking]], lexical: bool, comparison: Comparison
) -> list[Row]:
    """Rows of what is not trained here."""
    from trainer.compare.rankings import measure_ranking
    from trainer.compare.rows import measured_row

    a, b, depth = comparison.propensity["A"], comparison.propensity["B"], comparison.depth
    rows = []
    for name, file, answer in answers:
        figures = measure_ranking(answer.topk[:, :depth], dataset, a, b)
        rows.append(measured_row(name, "ranking", str(file), figures, answer.seconds))
    if lexical:
        from bidmatch.evaluation import Popularity, measure_lexical, query_counts

        popularity = Popularity(query_counts(dataset.train), len(dataset.train), a, b)
        for name, quality in measure_lexical(dataset, depth, popularity).items():
            parts = {"all": quality.metrics} | quality.by_frequency
            rows.append(measured_row(name, "lexical", "--lexical", parts, None))
    return rows


def _write(out: Path, empty: Comparison, rows: list[Row]) -> Comparison:
    """The comparison of these rows, written as JSON."""
    from datetime import UTC, datetime

    from trainer.compare.statistics import all_differences, query_error, view_differences
    from trainer.compare.write import write_json

    queries = empty.data.test_queries
    errors = {
        row.name: query_error(found.mean, queries) for row in rows if (found := row.figure("P@1")) is not None
    }
    comparison = empty.model_copy(
        update={
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": rows,
            "query_error": errors,
            "differences": all_differences(rows, queries),
            "views": view_differences(rows, queries),
        }
    )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out, comparison)
    return comparison


def _table(comparison: Comparison) -> Table:
    """The served views, for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from trainer.compare.write import seconds_text, spread_text

    table = Table(
        title=f"Percent on {comparison.data.test_queries:,} held-out queries, served view, exact search",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("")
    for name in (*_SHOWN, "seconds"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        if row.served is None:
            table.add_row(row.name, "failed")
            continue
        figures = [spread_text(row.figure(name)) for name in _SHOWN]
        table.add_row(row.name, *figures, seconds_text(row.seconds))
    return table
