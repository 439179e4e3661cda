"""`bidmatch score`: match a whole query log offline."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import ConfigError
from bidmatch.base.input_files import is_pattern
from bidmatch.base.processes import unwind_on_sigterm

if TYPE_CHECKING:
    from service.scoring.output import Summary
    from service.scoring.parts import Scorer

_EPILOG = """\b
Examples:
  bidmatch score --bundle runs/demo/bundle --input queries.tsv --output matches.parquet
  bidmatch score --bundle B --input log.parquet --query-column q -k 5 --min-score 0.8 --output matches.csv
  bidmatch score --bundle B --input day.jsonl.gz --output matches.parquet --json | jq .coverage
  bidmatch score --bundle B --input 'logs/**/*.tsv.zst' --output matches/ --shard 2/8
  bidmatch score --bundle /shared/B --input logs/ --output matches/ --engine ray --ray-address auto

Input, told by content: TSV or CSV with or without a header line, JSONL of objects or of strings, Parquet,
plain lines, search terms reports of ads platforms; text may be compressed by gzip or zstd; a folder means the
files in it and in its folders, hidden and underscored names aside. A line may have 1,048,576 characters. Each
distinct query is scored once: queries that differ in case or white space only are one.

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

An output with / at its end is a folder: part-00000.parquet and so on, each whole when it appears, then
_SUCCESS. The N shards of a log have together the rows of a run without --shard.
Give each shard an output of its own.

The output appears when it is whole. A run that was stopped, however hard, goes on where it was when the same
command is given again; its work is in .OUTPUT.work beside the output. Reading starts over, scoring does not.

--engine ray scores on the machines of a Ray cluster and writes the same output; this machine reads the log
and writes. bidmatch and the bundle, at the path given, have to be on each machine, but not log or output.
A stopped run may go on with the other engine.
"""


def existing_or_pattern(
    context: click.Context, option: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Path, ...]:
    """Paths that are there, and patterns.

    Raises:
        click.BadParameter: one is neither.
    """
    for path in paths:
        if not path.exists() and not is_pattern(path):
            raise click.BadParameter(f"{path} does not exist.", context, option)
    return paths


def _shard(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    number, _, of = value.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise click.BadParameter(f"{value!r} is not one of 1/N to N/N, such as 2/8.", context, option)
    return int(number), int(of)


def _scorer(
    where: Literal["local", "ray"], ray_address: str | None, actors: int | None, threads: int
) -> AbstractContextManager[Scorer] | None:
    """Gives what scores, for as long as the context holds; None: this process."""
    if where == "ray":
        from service.scoring.cluster import ray_scorer

        return ray_scorer(ray_address, actors, threads or 1)
    for name, value in (("--ray-address", ray_address), ("--actors", actors)):
        if value is not None:
            raise ConfigError(f"{name} is for scoring on Ray", hint=f"Add --engine ray, or leave {name} out.")
    return None


@click.command(epilog=_EPILOG, short_help="Match a whole query log offline.")
@click.option("--bundle", required=True, type=click.Path(exists=True, path_type=Path), help="Bundle folder.")
@click.option(
    "--input",
    "inputs",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    callback=existing_or_pattern,
    help="Query log, folder of them, or pattern in quotes ('logs/**/*.gz'); may be repeated.",
)
@click.option(
    "--output",
    required=True,
    help="File to write: .parquet, .csv, .tsv or .jsonl, text also .gz or .zst; with / at its end, a folder.",
)
@click.option(
    "--format",
    "form",
    help="Of a folder's files: parquet (the default), csv, tsv, jsonl, csv.gz, csv.zst ...",
)
@click.option("--rows-per-file", type=click.IntRange(1), help="Of a folder's files; 1,000,000 unless given.")
@click.option(
    "--shard", callback=_shard, help="I/N: score the I-th of N shares of the distinct queries, from 1."
)
@click.option("--unordered", is_flag=True, help="Write the queries in no particular order; takes less disk.")
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
    "--threads",
    type=click.IntRange(0),
    default=0,
    help="Cores to use; 0 (the default): all of them. With --engine ray: of each actor; 0: one.",
)
@click.option(
    "--engine",
    "where",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="What scores: this process, or actors of a Ray cluster.",
)
@click.option(
    "--ray-address",
    help="`auto` for the Ray cluster that this machine belongs to, or its HOST:PORT; if not given, a Ray is "
    "started on this machine.",
)
@click.option(
    "--actors",
    type=click.IntRange(1),
    help="Processes that score for --engine ray, each with the bundle loaded; if not given, as many as the "
    "cluster has cores for.",
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
    output: str,
    form: str | None,
    rows_per_file: int | None,
    shard: tuple[int, int] | None,
    unordered: bool,
    k: int,
    min_score: float | None,
    min_relevance: float | None,
    ef: int | None,
    rescore: bool | None,
    candidates: int | None,
    honour_match_types: bool,
    threads: int,
    where: Literal["local", "ray"],
    ray_address: str | None,
    actors: int | None,
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
    from service.memory import keep_little

    keep_little()
    from service.scoring.distinct import Shard
    from service.scoring.run import OutputFolder, ScoreOptions, score_log
    from service.settings import usable_cpus

    folder = None
    if output.endswith("/") or form is not None or rows_per_file is not None:
        said = {"format": form, "rows_per_file": rows_per_file}
        folder = OutputFolder.model_validate({name: one for name, one in said.items() if one is not None})
    options = ScoreOptions(
        bundle=bundle,
        inputs=list(inputs),
        output=Path(output),
        folder=folder,
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
        shard=None if shard is None else Shard(number=shard[0], of=shard[1]),
        unordered=unordered,
        restart=restart,
        overwrite=overwrite,
    )
    unwind_on_sigterm()
    try:
        summary = score_log(options, _scorer(where, ray_address, actors, threads))
    except (KeyboardInterrupt, SystemExit):
        say("stopped; what is scored is kept, and the same command goes on with it")
        raise
    if as_json:
        emit_json(summary.model_dump())
        return
    for line in _lines(summary):
        say(line)


def _lines(summary: Summary) -> list[str]:
    files = "" if summary.files == 1 else f" in {summary.files:,} files"
    shard = "" if summary.shard is None else f", shard {summary.shard}"
    lines = [
        f"{summary.output}{files}{shard}: {summary.matches:,} matches ({summary.exact:,} exact) of "
        f"{summary.distinct:,} distinct queries, {summary.matches_per_query:.1f} a query",
        f"coverage: {summary.coverage:.1f} % of distinct queries, {summary.traffic_coverage:.1f} % of "
        f"{summary.rows:,} rows; {summary.unmatched:,} queries without a match",
        f"read {summary.read_rows:,} rows, {summary.read_bytes / 1e6:,.1f} MB in "
        f"{summary.read_seconds:,.1f} s ({summary.read_rows / max(summary.read_seconds, 1e-3):,.0f} rows/s, "
        f"{summary.read_bytes / 1e6 / max(summary.read_seconds, 1e-3):,.1f} MB/s)",
        f"scored {summary.scored:,} queries in {summary.scoring_seconds:,.1f} s "
        f"({summary.queries_per_second:,.0f} queries/s); {summary.seconds:,.1f} s in all; "
        f"bundle {summary.bundle_id}",
    ]
    if summary.matches:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in summary.first_score_quantiles.items())
        lines.insert(2, f"score of first matches: {shown}")
    return lines
