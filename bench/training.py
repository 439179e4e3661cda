"""What training costs: a step against the number of labels, and against sentence-transformers' trainer.

    python -m bench.training [--json] [--quick] [--labels 10000,100000,1000000,10000000] [--part all]

`labels`: step time and peak memory of the same steps (`bag` encoder, 256 queries a batch, 64-d) at each
number of labels, Ψ and its moments themselves aside. The sizes take turns at every step and neighbouring
steps are compared, so that a busy machine slows all alike; memory is the peak growth of a process of its own
for each size. `step_time_ratio` and `memory_ratio` are the largest size over 10^5 labels. 10^7 labels take
5 GB.

`peer`: see `bench.trainer_peer`. `texts_per_s_ratio` and `queries_per_s_ratio` are ours over theirs, medians
over pairs of neighbouring steps.

On two cores both take under ten minutes, with --quick under two. Exits with 1 where a step grows by more than
the limit with the labels, where a text costs us more than them, or where we are not faster by the query.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

from bench.label_scale import Scale, steady_memory, step_memory, step_seconds
from bench.label_scale import summary as scale_summary
from bench.trainer_peer import Comparison, compare
from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import BidmatchError

LIMIT = 1.10
REFERENCE = 100_000


def alone(work: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None) -> Any:
    """What `work` returns in a fresh process of its own, with additions to its environment."""
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(work, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure_labels(scale: Scale) -> dict:
    """Time and memory at each size, and whether they stay within the limit from the reference up."""
    reference = next((size for size in scale.sizes if size >= REFERENCE), scale.sizes[-1])
    memory = {}
    for labels in scale.sizes:
        say(f"peak memory of steps over {labels:,} labels")
        memory[labels] = alone(step_memory, scale, labels, scale.sizes[0], environment=steady_memory())
    seconds = alone(step_seconds, scale, scale.sizes[0])
    result = scale_summary(scale, reference, seconds, memory)
    above = [row for row in result["rows"] if row["labels"] >= reference]
    worst = max(max(row["step_time_ratio"], row["memory_ratio"]) for row in above)
    return {**result, "limit": LIMIT, "within_limit": worst <= LIMIT}


def show_labels(result: dict) -> None:
    click.echo(
        f"{'labels':>12} {'step, ms':>10} {'(quartiles)':>18} {'ratio':>7} {'peak, MB':>10} {'ratio':>7} "
        f"{'Ψ + moments, MB':>16}"
    )
    for row in result["rows"]:
        low, high = row["step_ms_quartiles"]
        click.echo(
            f"{row['labels']:12,} {row['step_ms']:10.2f} {f'({low:.2f}, {high:.2f})':>18} "
            f"{row['step_time_ratio']:7.3f} {row['peak_mb']:10.2f} {row['memory_ratio']:7.3f} "
            f"{row['table_and_moments_mb']:16.1f}"
        )
    click.echo(
        f"ratios to {result['reference_labels']:,} labels, limit {LIMIT}; {result['steps']} steps each, "
        f"{result['threads']} of {result['cpu_count']} cores"
    )


def show_peer(result: dict) -> None:
    click.echo(f"\n{'':24} {'step, ms':>10} {'texts/step':>11} {'texts/s':>9} {'queries/s':>10}")
    for name, who in (("ours", "bidmatch"), ("theirs", "sentence-transformers")):
        row = result[name]
        click.echo(
            f"{who:24} {row['step_ms']:10.1f} {row['texts_a_step']:11.1f} {row['texts_per_s']:9.1f} "
            f"{row['queries_per_s']:10.1f}"
        )
    low, high = result["texts_per_s_ratio_quartiles"]
    click.echo(
        f"texts a second: {result['texts_per_s_ratio']:.3f} times theirs ({low:.3f}, {high:.3f}), "
        f"queries a second: {result['queries_per_s_ratio']:.3f} times; MiniLM-L6 whole, "
        f"{result['tokens_a_text']} tokens, {result['precision']}, "
        f"{result['pairs_of_steps']} pairs of steps, {result['threads']} threads, {result['data']} log"
    )
    click.echo(
        f"of {result['sampled_phrases_a_query']:.2f} sampled phrases a query, distinct ones encoded: "
        + ", ".join(f"{value:.2f} in {name}" for name, value in result["distinct_phrases_a_query"].items())
    )


def sizes_of(text: str) -> tuple[int, ...]:
    """Numbers of labels, ascending.

    Raises:
        BadParameter: they are not whole multiples of the smallest.
    """
    try:
        sizes = tuple(sorted({int(float(size)) for size in text.split(",")}))
    except ValueError as wrong:
        raise click.BadParameter("expected numbers, such as 10000,100000") from wrong
    if sizes[0] < 1000:
        raise click.BadParameter("at least 1000 labels are needed")
    return sizes


@click.command()
@click.option("--part", type=click.Choice(["all", "labels", "peer"]), default="all", show_default=True)
@click.option("--labels", default="1e4,1e5,1e6,1e7", show_default=True, help="Numbers of labels.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=1), help="At each size.")
@click.option("--queries", default=256, show_default=True, type=click.IntRange(min=2), help="A batch.")
@click.option("--dim", default=64, show_default=True, help="Width of the served vector.")
@click.option(
    "--pairs", default=40, show_default=True, type=click.IntRange(min=1), help="Steps of each peer."
)
@click.option("--texts", default=128, show_default=True, type=click.IntRange(min=8), help="A peer's step.")
@click.option("--tokens", default=12, show_default=True, type=click.IntRange(3, 128), help="Of every text.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="Log for `peer`; else simulated.")
@click.option("--bf16", is_flag=True, help="Both peers encode under bf16 autocast.")
@click.option("--threads", default=0, show_default=True, type=click.IntRange(min=0), help="0: all cores.")
@click.option(
    "--quick", is_flag=True, help="Up to 10^6 labels, and few steps: tries it out, measures little."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(
    part: str,
    labels: str,
    steps: int,
    queries: int,
    dim: int,
    pairs: int,
    texts: int,
    tokens: int,
    data: Path | None,
    bf16: bool,
    threads: int,
    quick: bool,
    as_json: bool,
) -> None:
    """Training cost against the number of labels, and beside sentence-transformers' trainer."""
    threads = threads or len(os.sched_getaffinity(0))
    sizes = sizes_of(labels)
    if quick:
        sizes, steps, pairs = tuple(size for size in sizes if size <= 10**6) or sizes[:1], 10, 5
    result: dict[str, Any] = {}
    passed = True
    if part != "peer":
        scale = Scale(sizes, steps, queries, dim, threads)
        result |= measure_labels(scale)
        passed &= result["within_limit"]
        if not as_json:
            show_labels(result)
    if part != "labels":
        comparison = Comparison(data, 1024 if quick else 8192, texts, tokens, pairs, threads, bf16)
        peer = alone(compare, comparison)
        faster = bool(peer["texts_per_s_ratio"] >= 1 and peer["queries_per_s_ratio"] > 1)
        result |= {
            "texts_per_s_ratio": peer["texts_per_s_ratio"],
            "queries_per_s_ratio": peer["queries_per_s_ratio"],
            "at_least_as_fast": faster,
            "peer": peer,
        }
        passed &= faster
        if not as_json:
            show_peer(peer)
    if as_json:
        emit_json(result)
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
