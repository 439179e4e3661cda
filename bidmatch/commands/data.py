"""`bidmatch data`: read whatever log there is and say what is in it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import click

from bidmatch.base.console import emit_json, say
from bidmatch.base.files import refuse_existing
from trainer.data.dataset import Dataset
from trainer.data.options_cli import read_options as with_read_options
from trainer.data.read import ReadOptions, read_dataset, report_lines
from trainer.data.write import pair_blocks, weight_text, write_pairs

EPILOG = """\b
Examples:
  bidmatch data clicks.tsv
  bidmatch data "Search terms report.csv" --write pairs.tsv
  bidmatch data amazon.xlsx google.csv --weight impressions --json
  bidmatch data ubi_events.ndjson ubi_queries.ndjson --phrases products.csv
  bidmatch data LF-AmazonTitles-131K --bad-lines skip

Read are click logs (TSV, CSV, JSONL, Parquet, XLSX: query, phrase[, weight]), search terms reports of
Google Ads, Microsoft Advertising and Amazon Ads, User Behavior Insights events, and data set folders:
trn.jsonl, tst.jsonl and labels.txt; raw texts of the extreme classification repository, with filter
files; PECOS text2text; BEIR. The format is recognised by content, plain or packed (gzip, zstd). Several files
are merged. docs/data.md shows each of them.
"""


@click.command("data", epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@with_read_options
@click.option("--show", type=click.IntRange(0), default=5, show_default=True, help="Pairs to show.")
@click.option(
    "--write", type=click.Path(path_type=Path, dir_okay=False), help="Write the normalised log (TSV)."
)
@click.option("--overwrite", is_flag=True, help="Let --write replace a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    files: tuple[Path, ...],
    read_options: ReadOptions,
    show: int,
    write: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Read a click log or ads report and say what is in it: the dry run of training.

    Prints the recognised format, the counts, what was left out and why, and a few pairs.
    """
    if write is not None:
        refuse_existing(write, overwrite=overwrite)
    dataset = read_dataset(files, read_options)
    pairs = _heaviest_queries(dataset, show)
    if as_json:
        emit_json({**dataset.report.model_dump(), "split": dataset.split.model_dump(), "pairs_shown": pairs})
    else:
        for line in report_lines(dataset.report, dataset.split):
            click.echo(line)
        for pair in pairs:
            kind = f" ({pair['match_type']})" if pair.get("match_type") else ""
            click.echo(f"  {pair['query']}  ->  {pair['phrase']}{kind}  x {pair['weight']:g}")
    if write is not None:
        count = write_pairs(write, dataset.phrases, (dataset.train, dataset.test))
        say(f"wrote {count:,} pairs to {write}")
        if dataset.report.filter_pairs:
            say("the pairs of the filter files have no place in a log and were not written")


def _heaviest_queries(dataset: Dataset, count: int) -> list[dict[str, Any]]:
    """The pairs of the queries with the greatest weight, up to `count` pairs."""
    part = dataset.train if len(dataset.train) else dataset.test
    totals = part.clicks.sum(axis=1).A1
    best = part.take((-totals).argsort(kind="stable")[:count])
    shown: list[dict[str, Any]] = []
    for queries, texts, weights, match_types in pair_blocks(dataset.phrases, best):
        for at in islice(range(len(queries)), count - len(shown)):
            pair: dict[str, Any] = {
                "query": queries[at],
                "phrase": texts[at],
                "weight": float(weight_text(weights[at])),
            }
            if match_types:
                pair["match_type"] = match_types[at]
            shown.append(pair)
    return shown
