"""`bidmatch score`: match a whole query log offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from bidmatch.base.console import emit_json, say

if TYPE_CHECKING:
    from service.scoring.output import Summary

_EPILOG = """\b
Examples:
  bidmatch score --bundle runs/demo/bundle --input queries.tsv --output matches.parquet
  bidmatch score --bundle B --input log.parquet --query-column q -k 5 --min-score 0.8 --output matches.csv
  bidmatch score --bundle B --input day.jsonl.gz --output matches.parquet --json | jq .coverage

Input, told by content: TSV or CSV with or without a header line, JSONL of objects or of strings, Parquet,
plain lines; text may be gzip-compressed; a folder means the files in it. Each distinct query is scored once:
queries that differ in case or white space only are one.

\b
Output: a row for each match, by query in the order of first appearance, then by rank:
  query       its first spelling            count       rows of the log with it
  rank        from 1                        id, phrase  the matched phrase
  score       encoder + classifier          encoder, classifier  the two weighted cosines, of the wide
                                                                 vectors where the bundle re-scores
  relevance   how likely it was clicked, 0 to 1; empty where the bundle has no calibration
  source      exact (the phrase is the query) or index
  and behind these the phrase's own columns, such as match_type.
Queries without a match have no row; the summary counts them.

The output appears when it is whole. A run that was stopped, however hard, goes on where it was when the same
command is given again; its work is in .OUTPUT.work beside the output. Reading starts over, scoring does not.
"""


@click.command(epilog=_EPILOG, short_help="Match a whole query log offline.")
@click.option("--bundle", required=True, type=click.Path(exists=True, path_type=Path), help="Bundle folder.")
@click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Query log or folder of them; may be repeated.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="File to write: .parquet, .csv, .tsv or .jsonl.",
)
@click.option("-k", "k", type=click.IntRange(1), default=10, show_default=True, help="Most matches a query.")
@click.option("--min-score", type=float, help="Leave out phrases with a lesser score, but not exact ones.")
@click.option(
    "--min-relevance",
    type=click.FloatRange(0, 1),
    help="Leave out phrases with a lesser relevance, but not exact ones; the bundle must have a calibration.",
)
@click.option("--ef", type=click.IntRange(1), help="Wider index search than the bundle's own.")
@click.option(
    "--rescore/--no-rescore",
    default=None,
    help="Re-score what the index finds with the bundle's wide vectors; on where it has some.",
)
@click.option(
    "--candidates", type=click.IntRange(1), help="Phrases to re-score, if not as many as the bundle says."
)
@click.option(
    "--honour-match-types/--ignore-match-types",
    default=True,
    show_default=True,
    help="Whether match types and negative keywords of phrases count, as they do when serving.",
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, help="Cores to use; 0 (the default): all of them."
)
@click.option("--query-column", help="Column with the queries: a name, or a position from 1.")
@click.option("--encoding", help="Encoding of text files; recognised unless given (UTF-8, UTF-16).")
@click.option(
    "--bad-lines",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="Stop at a line that cannot be read, or skip and count it.",
)
@click.option("--restart", is_flag=True, help="Begin anew, not where a stopped run was.")
@click.option("--overwrite", is_flag=True, help="Replace an output that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    bundle: Path,
    inputs: tuple[Path, ...],
    output: Path,
    k: int,
    min_score: float | None,
    min_relevance: float | None,
    ef: int | None,
    rescore: bool | None,
    candidates: int | None,
    honour_match_types: bool,
    threads: int,
    query_column: str | None,
    encoding: str | None,
    bad_lines: Literal["stop", "skip"],
    restart: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Match the queries of INPUT to phrases of a bundle and write the matches to OUTPUT."""
    # Each thread tokenises for itself; the tokenizer's own threads would ignore --threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from service.scoring.run import ScoreOptions, score_log
    from service.settings import usable_cpus

    options = ScoreOptions(
        bundle=bundle,
        inputs=list(inputs),
        output=output,
        k=k,
        min_score=min_score,
        min_relevance=min_relevance,
        ef=ef,
        rescore=rescore,
        candidates=candidates,
        honour_match_types=honour_match_types,
        threads=threads or usable_cpus(),
        query_column=query_column,
        encoding=encoding,
        bad_lines=bad_lines,
        restart=restart,
        overwrite=overwrite,
    )
    try:
        summary = score_log(options)
    except KeyboardInterrupt:
        say("stopped; what is scored is kept, and the same command goes on with it")
        raise
    if as_json:
        emit_json(summary.model_dump())
        return
    for line in _lines(summary):
        say(line)


def _lines(summary: Summary) -> list[str]:
    lines = [
        f"{summary.output}: {summary.matches:,} matches ({summary.exact:,} exact) of {summary.distinct:,} "
        f"distinct queries, {summary.matches_per_query:.1f} a query",
        f"coverage: {summary.coverage:.1f} % of distinct queries, {summary.traffic_coverage:.1f} % of "
        f"{summary.rows:,} rows; {summary.unmatched:,} queries without a match",
        f"scored {summary.scored:,} queries in {summary.scoring_seconds:,.1f} s "
        f"({summary.queries_per_second:,.0f} queries/s); {summary.seconds:,.1f} s in all; "
        f"bundle {summary.bundle_id}",
    ]
    if summary.matches:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in summary.first_score_quantiles.items())
        lines.insert(2, f"score of first matches: {shown}")
    return lines
