"""`bidmatch demo`: the whole chain on a simulated log."""

from __future__ import annotations

from pathlib import Path

import click

from bidmatch.base.console import emit_json
from bidmatch.base.processes import unwind_on_sigterm

# The simulated log is learnt quickly; a real one wants its preset's own number.
EPOCHS = 4

_EPILOG = """\b
Examples:
  bidmatch demo
  bidmatch demo --out runs/small --phrases 2000 --queries 8000 --seed 1
  bidmatch demo --set epochs=3 --json > figures.json

Left in the folder: log.tsv, run/ (with report.html), bundle/, report.json, server.log. Running it again
starts afresh there. Takes one to three minutes on two cores.
"""


@click.command(epilog=_EPILOG, short_help="The whole chain on a simulated log, in minutes.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for everything.",
)
@click.option(
    "--phrases", type=click.IntRange(10), default=5_000, show_default=True, help="Phrases to simulate."
)
@click.option(
    "--queries", type=click.IntRange(50), default=20_000, show_default=True, help="Queries to draw."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of everything.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help=f"Passed on to `bidmatch train`, after epochs={EPOCHS}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
def command(
    out: Path, phrases: int, queries: int, seed: int, settings: tuple[str, ...], as_json: bool
) -> None:
    """Simulate an ads click log, train, export, serve, match over HTTP, and measure against two baselines."""
    from bidmatch.demo.run import Demo, run_demo, tables
    from bidmatch.evaluation import print_tables

    unwind_on_sigterm()
    arguments = tuple(part for setting in (f"epochs={EPOCHS}", *settings) for part in ("--set", setting))
    report = run_demo(Demo(out, phrases, queries, seed, arguments))
    if as_json:
        emit_json(report)
    else:
        print_tables(tables(report))
