"""`bidmatch distill`: a small encoder in the place of a run's own."""

from __future__ import annotations

from pathlib import Path

import click

from bidmatch.base.console import emit_json

_EPILOG = """\b
Examples:
  bidmatch distill --checkpoint runs/minilm --encoder bag --out runs/minilm-bag
  bidmatch distill --checkpoint runs/minilm --encoder transformer:2 --out runs/minilm-2 --epochs 5
  bidmatch export --checkpoint runs/minilm-bag --out bundles/fast

The student learns to give the vectors that the run's encoder gives to the training queries and the phrases.
Classifier tables and phrase vectors stay the run's own, so the index of the student's bundle is the same;
only the encoder of queries is another. STUDENT appears whole or not at all.
"""


@click.command(short_help="Train a small encoder to stand in for a run's own.", epilog=_EPILOG)
@click.option(
    "--checkpoint",
    "run",
    required=True,
    metavar="RUN",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The --out folder of `bidmatch train`: the teacher.",
)
@click.option(
    "--encoder",
    default="bag",
    show_default=True,
    metavar="bag|transformer:N",
    help="The student: a bag of word vectors, or the N lower layers of the teacher's transformer.",
)
@click.option(
    "--out", required=True, metavar="STUDENT", type=click.Path(path_type=Path), help="The run folder to make."
)
@click.option(
    "--epochs",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Passes over training queries and phrases.",
)
@click.option(
    "--batch", type=click.IntRange(1), default=256, show_default=True, help="Queries and phrases a step."
)
@click.option(
    "--encoder-lr",
    type=click.FloatRange(0, min_open=True),
    help="Learning rate of the encoder; by default that of its kind.",
)
@click.option(
    "--heads-lr", type=click.FloatRange(0, min_open=True), help="Learning rate of the heads; likewise."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of everything random.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads; 0 (the default): all cores.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    run: Path,
    encoder: str,
    out: Path,
    epochs: int,
    batch: int,
    encoder_lr: float | None,
    heads_lr: float | None,
    seed: int,
    device: str,
    threads: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Train a student of RUN's encoder, whose vectors fit RUN's phrases, and say what it loses and gains."""
    from export.timing import milliseconds_of
    from trainer.distil import distil
    from trainer.report import summary_lines
    from trainer.student import StudentOptions

    options = StudentOptions(
        encoder=encoder,
        epochs=epochs,
        queries=batch,
        encoder_lr=encoder_lr,
        heads_lr=heads_lr,
        seed=seed,
        device=device,
        threads=threads,
    )
    report = distil(run, options, out, milliseconds_of, overwrite=overwrite)
    if as_json:
        emit_json(report)
        return
    for line in summary_lines(report):
        click.echo(line)
    click.echo(f"report: {out / 'report.html'}; next: bidmatch export --checkpoint {out} --out BUNDLE")
