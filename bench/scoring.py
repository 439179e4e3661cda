"""How near `bidmatch score` comes to encode + search alone, and whether its memory grows with the log.

    python -m bench.scoring [--json] [--queries 1000000] [--bundle runs/bench-serving/minilm-1000000]

`ceiling_ratio`: distinct queries a second of a whole run, from its first byte read to its last written, over
those of a tight loop of encode + search over the very same batches with as many threads. Each is a process of
its own; they take turns, and the ratio is the median over the rounds. `scoring_ratio` leaves loading the
bundle and reading the log out of the run. The log has each query once and then three times as many rows drawn
by Zipf's law.

`ray_actors_ratio`: queries a second that two actors of `--engine ray` score over those of one, of a thread
each, on a Ray of this machine. Each is a process of its own; they take turns, and the ratio is the median
over the rounds. Ray's start and the loading of the bundle are left out: the clock runs from the results of
the fourth part, when both actors have scored some, to those of the last.

`rss_ratio`: peak resident memory of a run over `--rows` rows drawn by Zipf's law over that of one over
`--few-rows`, bundle included.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import BidmatchError
from bidmatch.demo.inventory import inventory
from service.engine import Engine
from service.scoring.distinct import PART_QUERIES
from service.scoring.parts import Job, batches

WORK = Path("runs/bench-serving")
_K = 10
_ZIPF = 1.05
_CHUNK = 1 << 17
_RAY_FIRST = 4


def write_log(path: Path, distinct: int, rows: int, *, each_once: bool, seed: int = 0) -> None:
    """A TSV log of `rows` queries drawn by Zipf's law from `distinct` texts; with `each_once` these first."""
    stock = inventory(max(distinct, 1000), 1)
    rng = np.random.default_rng(seed)
    shares = np.arange(1, distinct + 1, dtype=np.float64) ** -_ZIPF
    shares = np.cumsum(shares) / shares.sum()
    schema = pa.schema([("query", pa.large_string()), ("day", pa.string())])
    options = pcsv.WriteOptions(delimiter="\t", quoting_style="none")
    with pcsv.CSVWriter(path, schema, write_options=options) as out:
        for start in range(0, rows, _CHUNK):
            count = min(_CHUNK, rows - start)
            drawn = np.searchsorted(shares, rng.random(count)).clip(max=distinct - 1)
            if each_once:
                drawn = np.where(
                    np.arange(start, start + count) < distinct, np.arange(start, start + count), drawn
                )
            texts = stock.phrase_texts(drawn).cast(pa.large_string())
            out.write_table(pa.table([texts, pa.array(["2026-01-01"] * count)], schema=schema))


def run(bundle: Path, log: Path, folder: Path, threads: int) -> dict[str, Any]:
    """A whole run's summary, with `rss_mb`, its peak resident memory."""
    output = folder / "matches.parquet"
    command = [sys.executable, "-m", "bidmatch", "score", "--bundle", str(bundle), "--input", str(log)]
    command += ["--output", str(output), "-k", str(_K), "--threads", str(threads), "--json", "--overwrite"]
    said = folder / "summary.json"
    with said.open("wb") as out, subprocess.Popen(command, stdout=out) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BidmatchError(f"the run ended with code {process.returncode}")
    output.unlink()
    return json.loads(said.read_text()) | {"rss_mb": usage.ru_maxrss / 1024}


def ceiling(bundle: Path, queries: Path, threads: int) -> float:
    """Queries a second of encode + search in a tight loop, in a process of its own."""
    command = [sys.executable, "-m", "bench.scoring", "--ceiling", str(queries), "--bundle", str(bundle)]
    command += ["--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def tight_loop(bundle: Path, queries: Path, threads: int) -> float:
    """Queries a second over all batches of an Arrow file of queries, a batch for each part."""
    engine = Engine.load(bundle)
    parts = []
    with pa.OSFile(str(queries)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            texts = reader.get_batch(number).column("query").to_pylist()
            lengths = np.fromiter(map(len, texts), np.int64, len(texts))
            parts += [[texts[at] for at in members.tolist()] for members in batches(lengths)]
    engine.match(parts[0], _K)
    turns = itertools.count()

    def work() -> None:
        while (turn := next(turns)) < len(parts):
            engine.match(parts[turn], _K)

    started = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(map(len, parts)) / (time.perf_counter() - started)


def write_queries(log: Path, path: Path, folder: Path) -> None:
    """The distinct queries of a log as a run divides them into parts."""
    from service.scoring.distinct import LogCounts, write_distinct
    from service.scoring.queries import BadLines, read_log

    chunks = read_log([log], None, None, BadLines(False), lambda _: None)
    write_distinct(chunks, LogCounts(), path, folder / "scratch")


def measure_ceiling(bundle: Path, queries: int, threads: int, rounds: int, folder: Path) -> dict[str, Any]:
    say(f"writing a log of {4 * queries:,} rows")
    log, distinct = folder / "log.tsv", folder / "queries.arrow"
    write_log(log, queries, 4 * queries, each_once=True)
    write_queries(log, distinct, folder)
    whole, scoring, alone = [], [], []
    for number in range(rounds):
        summary = run(bundle, log, folder, threads)
        whole.append(summary["distinct"] / summary["seconds"])
        scoring.append(summary["distinct"] / summary["scoring_seconds"])
        alone.append(ceiling(bundle, distinct, threads))
        say(f"round {number + 1}: run {whole[-1]:,.0f}, loop {alone[-1]:,.0f} queries/s")
    return {
        "ceiling_ratio": float(np.median(np.divide(whole, alone))),
        "scoring_ratio": float(np.median(np.divide(scoring, alone))),
        "run_per_second": float(np.median(whole)),
        "scoring_per_second": float(np.median(scoring)),
        "ceiling_per_second": float(np.median(alone)),
        "distinct": summary["distinct"],
        "log_rows": summary["rows"],
        "read_rows_per_second": summary["read_rows"] / max(summary["read_seconds"], 1e-3),
        "rounds": rounds,
        "threads": threads,
    }


def on_ray(bundle: Path, queries: Path, actors: int) -> float:
    """Queries a second of so many actors, in a process of its own."""
    command = [sys.executable, "-m", "bench.scoring", "--on-ray", str(queries), "--bundle", str(bundle)]
    done = subprocess.run([*command, "--actors", str(actors)], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def ray_rate(bundle: Path, queries: Path, actors: int) -> float:
    """Queries a second of the parts of an Arrow file of queries that come after the first few."""
    from service.scoring.cluster import ray_scorer

    engine = Engine.load(bundle)
    with pa.OSFile(str(queries)) as file:
        parts = pa.ipc.open_file(file).num_record_batches
    times, counts = [], []
    with ray_scorer(None, actors, 1) as scorer:
        for _, count in scorer(engine, Job(queries, range(parts), _K, None, None)):
            times.append(time.perf_counter())
            counts.append(count)
    return sum(counts[_RAY_FIRST:]) / (times[-1] - times[_RAY_FIRST - 1])


def measure_ray(bundle: Path, parts: int, rounds: int, folder: Path) -> dict[str, Any]:
    log, queries = folder / "ray.tsv", folder / "ray.arrow"
    write_log(log, parts * PART_QUERIES, parts * PART_QUERIES, each_once=True)
    write_queries(log, queries, folder)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for actors, found in rates.items():
            found.append(on_ray(bundle, queries, actors))
        say(f"round {number + 1}: one actor {rates[1][-1]:,.0f}, two {rates[2][-1]:,.0f} queries/s")
    return {
        "ray_actors_ratio": float(np.median(np.divide(rates[2], rates[1]))),
        "ray_one_per_second": float(np.median(rates[1])),
        "ray_two_per_second": float(np.median(rates[2])),
        "ray_parts": parts,
        "ray_rounds": rounds,
    }


def measure_memory(bundle: Path, few: int, many: int, threads: int, folder: Path) -> dict[str, Any]:
    peaks = {}
    for name, rows in (("few", few), ("many", many)):
        log = folder / f"{name}.tsv"
        say(f"memory of a run over {rows:,} rows")
        write_log(log, max(1000, rows // 4), rows, each_once=False)
        peaks[name] = run(bundle, log, folder, threads)
        log.unlink()
    return {
        "rss_ratio": peaks["many"]["rss_mb"] / peaks["few"]["rss_mb"],
        "rss_mb": peaks["many"]["rss_mb"],
        "few_rss_mb": peaks["few"]["rss_mb"],
        "many_rows": many,
        "few_rows": few,
        "many_distinct": peaks["many"]["distinct"],
    }


@click.command()
@click.option("--bundle", default=WORK / "minilm-1000000", show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--memory-bundle", default=WORK / "bag-100000", show_default=True, type=click.Path(path_type=Path)
)
@click.option("--queries", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--rows", default=10_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--few-rows", default=100_000, show_default=True, type=click.IntRange(1000))
@click.option("--threads", default=0, help="0: all cores.", type=click.IntRange(0))
@click.option("--ray-parts", default=16, show_default=True, type=click.IntRange(_RAY_FIRST + 1))
@click.option(
    "--part", default="all", show_default=True, type=click.Choice(["all", "ceiling", "memory", "ray"])
)
@click.option("--ceiling", "alone", hidden=True, type=click.Path(path_type=Path))
@click.option("--on-ray", "by_actors", hidden=True, type=click.Path(path_type=Path))
@click.option("--actors", hidden=True, default=1)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(
    bundle: Path,
    memory_bundle: Path,
    queries: int,
    rounds: int,
    rows: int,
    few_rows: int,
    threads: int,
    ray_parts: int,
    part: str,
    alone: Path | None,
    by_actors: Path | None,
    actors: int,
    as_json: bool,
) -> None:
    """Measure all or a part; the bundles are those of `python -m bench.serving.bundles`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    threads = threads or len(os.sched_getaffinity(0))
    if alone is not None:
        click.echo(tight_loop(bundle, alone, threads))
        return
    if by_actors is not None:
        click.echo(ray_rate(bundle, by_actors, actors))
        return
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if part in ("all", "ceiling"):
            result |= measure_ceiling(bundle, queries, threads, rounds, folder)
        if part in ("all", "ray"):
            result |= measure_ray(bundle, ray_parts, rounds, folder)
        if part in ("all", "memory"):
            result |= measure_memory(memory_bundle, few_rows, rows, threads, folder)
    if as_json:
        emit_json(result)
        return
    for name, value in result.items():
        click.echo(f"{name:>22} {value:,.3f}" if isinstance(value, float) else f"{name:>22} {value:,}")


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
