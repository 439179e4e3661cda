"""`bidmatch diff`: compare what two bundles, or a bundle and another service, answer to one query log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click

from bidmatch.base.console import emit_json, say
from bidmatch.base.processes import unwind_on_sigterm
from bidmatch.commands.score import existing_or_pattern

_EPILOG = """\b
Examples:
  bidmatch diff bundles/monday bundles/tuesday --queries queries.tsv
  bidmatch diff broad-match.tsv bundles/mine --queries day.tsv --output changes.tsv
  bidmatch diff A B --queries day.parquet -k 5 --min-score 0.8 --json | jq .traffic.overlap

A and B are each a bundle folder or matches that something else gave: a file, a folder of files, or a pattern
in quotes. Such a file is Parquet, CSV, TSV or JSONL, packed or not, and has a row for each match: query,
phrase or id or both, and rank, from 1, where rows are not in order. `bidmatch score` writes such files.

The log is read as `bidmatch score` reads it, each distinct query once; figures are given with each query once
and with each as often as the log has it. Phrases are the same where their ids are, or their normalised texts
where A and B have no ids in common, or have ids in common that mostly belong to different texts.

--output has a row for each distinct query: query, count, matches_a, matches_b, common, same_first, and the
phrases lost and gained: lists in Parquet and JSONL, joined by " | " in CSV and TSV.
"""


def _bundle_or_matches(context: click.Context, option: click.Parameter, path: Path) -> Path:
    return existing_or_pattern(context, option, (path,))[0]


@click.command(epilog=_EPILOG, short_help="Compare two bundles, or other matches with one, on a query log.")
@click.argument("a", type=click.Path(path_type=Path), callback=_bundle_or_matches)
@click.argument("b", type=click.Path(path_type=Path), callback=_bundle_or_matches)
@click.option(
    "--queries",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    callback=existing_or_pattern,
    help="Query log, folder of them, or quoted pattern such as 'logs/*.tsv.gz'; may be repeated.",
)
@click.option(
    "-k", "--k", "k", type=click.IntRange(1), default=10, show_default=True, help="Most matches a query."
)
@click.option(
    "--min-score",
    type=float,
    help="Leave out phrases of a bundle with a lesser score, but not exact ones.",
)
@click.option("--by", type=click.Choice(["id", "text"]), help="What tells that two phrases are the same.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a row for each query: .parquet, .csv, .tsv or .jsonl, text also .gz or .zst.",
)
@click.option("--overwrite", is_flag=True, help="Replace an output that is there.")
@click.option(
    "--examples",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Queries and phrases of each kind to name.",
)
@click.option("--query-column", help="The log's column with the queries: a name, or a position from 1.")
@click.option("--encoding", help="Encoding of the log's text files; recognised unless given (UTF-8, UTF-16).")
@click.option(
    "--bad-lines",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="Stop at a line that cannot be read, or skip and count it.",
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, help="Cores to use; 0 (the default): all of them."
)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def command(
    a: Path,
    b: Path,
    queries: tuple[Path, ...],
    k: int,
    min_score: float | None,
    by: Literal["id", "text"] | None,
    output: Path | None,
    overwrite: bool,
    examples: int,
    query_column: str | None,
    encoding: str | None,
    bad_lines: Literal["stop", "skip"],
    threads: int,
    as_json: bool,
) -> None:
    """Compare the answers of A and B, bundles or files of matches, to the queries of a log."""
    # Each thread tokenises for itself; the tokenizer's own threads would ignore --threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from service.memory import keep_little

    keep_little()
    from service.comparing.lines import lines_of
    from service.comparing.records import CompareOptions
    from service.comparing.run import compare
    from service.settings import usable_cpus

    unwind_on_sigterm()
    found = compare(
        CompareOptions(
            a=a,
            b=b,
            logs=list(queries),
            k=k,
            min_score=min_score,
            by=by,
            output=output,
            overwrite=overwrite,
            examples=examples,
            query_column=query_column,
            encoding=encoding,
            bad_lines=bad_lines,
            threads=threads or usable_cpus(),
        )
    )
    if as_json:
        emit_json(found.model_dump())
        return
    for line in lines_of(found):
        say(line)
