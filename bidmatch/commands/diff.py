"""`bidmatch diff`: compare what two bundles answer to one query log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from bidmatch.base.console import emit_json, say
from bidmatch.commands.score import existing_or_pattern

if TYPE_CHECKING:
    from service.comparing import Comparison

_EPILOG = """\b
Examples:
  bidmatch diff bundles/monday bundles/tuesday --queries queries.tsv
  bidmatch diff A B --queries day.parquet -k 5 --min-score 0.8 --json | jq .traffic.overlap

The log is read as `bidmatch score` reads it, each distinct query once; figures are given with each query once
and with each as often as the log has it. Phrases are the same where their ids are, or, where the bundles have
no id in common, where their normalised texts are.
"""


@click.command(epilog=_EPILOG, short_help="Compare what two bundles answer to one log.")
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
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
@click.option("--min-score", type=float, help="Leave out phrases with a lesser score, but not exact ones.")
@click.option("--by", type=click.Choice(["id", "text"]), help="What tells that two phrases are the same.")
@click.option("--query-column", help="Column with the queries: a name, or a position from 1.")
@click.option("--encoding", help="Encoding of text files; recognised unless given (UTF-8, UTF-16).")
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
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    a: Path,
    b: Path,
    queries: tuple[Path, ...],
    k: int,
    min_score: float | None,
    by: Literal["id", "text"] | None,
    query_column: str | None,
    encoding: str | None,
    bad_lines: Literal["stop", "skip"],
    threads: int,
    as_json: bool,
) -> None:
    """Compare the answers of bundles A and B to the queries of a log."""
    # Each thread tokenises for itself; the tokenizer's own threads would ignore --threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from service.comparing import compare
    from service.settings import usable_cpus

    found = compare(
        a,
        b,
        list(queries),
        k=k,
        min_score=min_score,
        by=by,
        query_column=query_column,
        encoding=encoding,
        bad_lines=bad_lines,
        threads=threads or usable_cpus(),
    )
    if as_json:
        emit_json(found.model_dump())
        return
    for line in _lines(found):
        say(line)


def _lines(found: Comparison) -> list[str]:
    lines = [
        f"A is bundle {found.bundle_a}, B is bundle {found.bundle_b}; {found.rows:,} rows; "
        f"phrases are told by {found.by}"
    ]
    if found.skipped:
        lines.append(f"{found.skipped:,} bad lines skipped")
    if not found.scores_comparable:
        lines.append("A and B are of different models: their scores are not comparable")
    for name, part in (("each query once", found.queries), ("as often as in the log", found.traffic)):
        lines += [
            f"{name}: {part.queries:,} queries",
            f"  coverage: A {part.coverage_a:.1f} %, B {part.coverage_b:.1f} %; "
            f"{part.gained:,} queries gained all their matches, {part.lost:,} lost them",
            f"  matches a query: A {part.matches_a:.2f}, B {part.matches_b:.2f}",
            f"  of A's {found.k} best also B's: {_percent(part.overlap)}; "
            f"same first, of queries matched by both: {_percent(part.same_first)}",
        ]
        if part.score_shift is not None and found.scores_comparable:
            lines.append(f"  score of common pairs, B less A: {part.score_shift:+.3f} on average")
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"
