"""Train other systems on our split and write their rankings, for `bidmatch compare --ranking NAME=FILE`.

    python -m bench.peers --data DATA --out FOLDER [--systems pecos,omikuji,napkinxc] [--threads 1]

`pecos` writes pecos-xrlinear.npz; `omikuji` writes omikuji-bonsai.npz and omikuji-parabel.npz; `napkinxc`
writes napkinxc-plt.npz. Each file holds

    topk                    int64 (test queries, 100): label rows in the data's order, best first, -1 padded
    seconds                 training, making the features of the training queries included
    ms_per_query            ranking one test query, making its features included
    vectorise_seconds, vectorise_ms_per_query: of these, what the features cost
    system, version, settings, threads, fingerprint (of the data)

All see the same features: sublinear TF-IDF of words, word pairs and character 3- and 4-grams, fitted on the
training queries. Settings are each system's published ones, nothing is tuned on the test queries. The peers
train on all training queries; bidmatch keeps 5% of these for validation.

The systems run one after another, each in its own process and its own virtual environment under .peers/,
which is made when it is missing (about a minute each). One that takes more than --minutes is stopped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

from bench.peers.environments import NAPKINXC, OMIKUJI, PECOS, Environment, prepare
from bench.peers.problem import finish_ranking, write_problem
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError, ConfigError
from trainer.data.options import ReadOptions
from trainer.data.options_cli import read_options
from trainer.data.read import read_dataset, report_lines

SYSTEMS = {"pecos": PECOS, "omikuji": OMIKUJI, "napkinxc": NAPKINXC}
WORKERS = Path(__file__).parent / "workers"


def run_system(environment: Environment, problem: Path, out: Path, threads: int, minutes: float) -> None:
    """Train and rank in the system's environment; rankings go into the problem's folder, the log into `out`.

    Raises:
        BidmatchError: it failed, or took longer than `minutes`.
    """
    python = prepare(environment)
    script = WORKERS / f"run_{environment.name}.py"
    # Thread counts of the numerical libraries are read when they load.
    limits = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)
    )
    log = out / f"{environment.name}.log"
    say(f"{environment.name}: training; its own output goes to {log}")
    try:
        with log.open("wb") as written:
            subprocess.run(
                [str(python), str(script), str(problem), str(threads)],
                env={**os.environ, **limits},
                stdout=written,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=60 * minutes,
            )
    except subprocess.TimeoutExpired as late:
        raise BidmatchError(f"{environment.name} was stopped after {minutes:g} minutes") from late
    except subprocess.CalledProcessError as failed:
        end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise BidmatchError(f"{environment.name} failed, exit status {failed.returncode}:\n{end}") from failed


def chosen_systems(text: str) -> list[str]:
    """The systems named, comma-separated.

    Raises:
        ConfigError: one is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise ConfigError(f"--systems {text}: choose from {', '.join(SYSTEMS)}")
    return names


@click.command()
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="Log or dataset folder; may be repeated.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the rankings.")
@click.option("--systems", default=",".join(SYSTEMS), show_default=True)
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--minutes", default=60.0, show_default=True, help="Longest that one system may take.")
@read_options
def main(
    data: tuple[Path, ...], out: Path, systems: str, threads: int, minutes: float, read_options: ReadOptions
) -> None:
    """Write the rankings of other systems on the held-out queries of DATA."""
    names = chosen_systems(systems)
    dataset = read_dataset(list(data), read_options)
    for line in report_lines(dataset.report, dataset.split):
        say(line)
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="bidmatch-peers-") as scratch:
        problem = Path(scratch)
        write_problem(dataset, problem)
        for name in names:
            try:
                run_system(SYSTEMS[name], problem, out, threads, minutes)
            except BidmatchError as wrong:
                failed += 1
                say(f"error: {wrong}")
            # What a stopped system had finished counts, too.
            for made in sorted((problem / "rankings").glob("*.npz")):
                say(finish_ranking(Path(shutil.move(made, out / made.name)), dataset))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
