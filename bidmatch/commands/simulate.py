"""`bidmatch simulate`: a made-up ads click log of any size."""

from __future__ import annotations

from pathlib import Path

import click

from bidmatch.base.console import emit_json, say
from bidmatch.base.files import refuse_existing, remove_partials

_EPILOG = """\b
Examples:
  bidmatch simulate --phrases 10000 --queries 40000 --out log.tsv
  bidmatch simulate --phrases 20000000 --queries 60000000 --seed 7 --out big.tsv
  bidmatch simulate --phrases 5000 --queries 20000 --format google-ads --out report.csv

No click log of sponsored search is public, so this one is made up: good for trying the product and for
measuring time and memory, no evidence of quality on real traffic. Memory doesn't grow with the log.
"""


@click.command(epilog=_EPILOG, short_help="Write a simulated ads click log of any size.")
@click.option(
    "--phrases", type=click.IntRange(1), required=True, help="Distinct bid phrases; all are clicked."
)
@click.option(
    "--queries",
    type=click.IntRange(1),
    required=True,
    help="Queries drawn, a quarter of the phrases at least. Some come out equal, so the log has fewer "
    "distinct ones.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same log.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["tsv", "google-ads"]),
    default="tsv",
    show_default=True,
    help="Click log, or a Google Ads search terms report (.csv: UTF-8 with commas; else UTF-16 with tabs).",
)
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    phrases: int, queries: int, seed: int, out: Path, kind: str, overwrite: bool, as_json: bool
) -> None:
    """Write a simulated ads click log: queries, bid phrases, clicks.

    Intents are made of product, brand, attributes and purpose; people use synonyms, model names and
    misspellings; popularity is Zipf's; some clicks are wrong.
    """
    from bidmatch.demo.write_log import summary_lines, write_click_log, write_google_ads

    refuse_existing(out, overwrite=overwrite)
    remove_partials(out)
    write = write_google_ads if kind == "google-ads" else write_click_log
    summary = write(out, phrases, queries, seed)
    if as_json:
        emit_json(summary.model_dump())
    else:
        for line in summary_lines(summary):
            say(line)
