"""`bidmatch train`: a click log to a run folder."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from bidmatch.base.console import emit_json, say
from trainer.config import TrainConfig
from trainer.data.options import ReadOptions
from trainer.data.options_cli import read_options
from trainer.settings import PRESETS, bounds_of, make_config, preset_names


@click.command(
    epilog="""\b
Examples:
  bidmatch train --data clicks.tsv --out runs/first
  bidmatch train --data clicks.parquet --out runs/wide --set dim=512 --set epochs=20
  bidmatch train --data search_terms.csv --out runs/minilm --preset unidec
  torchrun --standalone --nproc-per-node 8 -m bidmatch train --data clicks.parquet --out runs/large

The same command again resumes a run that was stopped. PRESET is a shipped name or a YAML file.""",
)
@click.option(
    "--data",
    "data",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Click log, ads report, or folder; may be repeated.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Run folder to make or resume.")
@click.option("--preset", help="Default: `unidec` with a GPU, `wide` without one.")
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change one setting, such as dim=512."
)
@click.option("--overwrite", is_flag=True, help="Delete the run that is in --out and begin anew.")
@click.option(
    "--list-presets",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda c, _, on: _list(c, on),
    help="Print the shipped presets, and the default and bounds of every setting.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")
@read_options
def command(
    data: tuple[Path, ...],
    out: Path,
    preset: str | None,
    assignments: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
    read_options: ReadOptions,
) -> None:
    """Train the dual encoder and the classifier table on a click log."""
    from trainer.data.read import read_dataset, report_lines
    from trainer.distributed import join_workers, leave_workers

    # Imported before the log is read, so that a missing package is said at once.
    from trainer.run import run_training

    workers = join_workers()
    dataset = None

    def prepare() -> TrainConfig:
        nonlocal dataset
        config = make_config(preset or _default_preset(), list(assignments))
        dataset = read_dataset(list(data), read_options)
        for line in report_lines(dataset.report, dataset.split):
            say(line)
        settings = yaml.safe_dump(config.model_dump(), sort_keys=False).strip()
        say("configuration:\n  " + settings.replace("\n", "\n  "))
        return config

    config = workers.first(prepare)
    report = run_training(dataset, config, out, overwrite=overwrite, workers=workers)
    leave_workers(workers)
    if not workers.first_of_all:
        return
    if as_json:
        emit_json(report)
        return
    from trainer.report import summary_lines

    for line in summary_lines(report):
        click.echo(line)
    click.echo(f"report: {out / 'report.html'}; next: bidmatch export --checkpoint {out} --out BUNDLE")


def _default_preset() -> str:
    from trainer.devices import has_gpu

    preset = "unidec" if has_gpu() else "wide"
    say(f"preset {preset} ({'a' if preset == 'unidec' else 'no'} GPU was found)")
    return preset


def _list(context: click.Context, on: bool) -> None:
    if on:
        for name in preset_names():
            click.echo(f"# --preset {name}\n{(PRESETS / f'{name}.yaml').read_text(encoding='utf-8')}")
        defaults = yaml.safe_dump(TrainConfig().model_dump(), sort_keys=False)
        click.echo(f"# What a preset leaves out, and every setting that --set takes\n{defaults}", nl=False)
        click.echo("# Bounds of the numbers")
        for name, bounds in bounds_of(TrainConfig):
            click.echo(f"#   {name}: {bounds}")
        context.exit()
