"""What sharded search would take: a query asked of n machines at once, answered when the last has answered.

    python -m bench.serving.shards [--json] [--seconds 120] [--work runs/bench-serving]

Measured: one `bidmatch serve` of the bundle of a million phrases, MiniLM-L6, cache off, in open loops at
shares of its peak; each request's latency is kept. Simulated from these: n such shards, each under that
load, whose latencies are drawn from the measured ones, each for itself. Of n shards the q-quantile is then
one shard's q^(1/n)-quantile, without drawing; `hedged` draws: each shard has a twin on another machine,
which is asked, too, where no answer came within the 95th percentile (5% more requests).

Left out: the network, and what queries have in common, as a long one takes long at every shard.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from bench.serving.bundles import WORK, K, bundle_of, queries_of
from bench.serving.load import Job, load, raise_file_limit
from bench.serving.overload import PEAK_CONNECTIONS, PEAK_S
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import minilm
from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import BidmatchError

SHARES = (0.25, 0.5, 0.7)
SHARDS = (1, 2, 4, 8, 16, 32, 64)
_CONNECTIONS = 512
_HEDGE = 0.95
_DRAWS = 100_000


def fan_out(latencies: np.ndarray, shards: int, quantile: float) -> float:
    """The quantile of the largest of so many independent draws from measured latencies."""
    return float(np.quantile(latencies, quantile ** (1 / shards)))


def hedged(latencies: np.ndarray, shards: int, quantile: float, rng: np.random.Generator) -> float:
    """`fan_out` where a twin is asked, too, once the 95th percentile has passed."""
    patience = float(np.quantile(latencies, _HEDGE))
    slowest = np.zeros(_DRAWS)
    for _ in range(shards):
        first, second = rng.choice(latencies, _DRAWS), rng.choice(latencies, _DRAWS)
        slowest = np.maximum(slowest, np.where(first > patience, np.minimum(first, patience + second), first))
    return float(np.quantile(slowest, quantile))


def figures(latencies: np.ndarray, share: float, rng: np.random.Generator) -> dict[str, Any]:
    """Milliseconds by number of shards, for one load."""
    ms = latencies * 1e3
    found: dict[str, Any] = {}
    for shards in SHARDS:
        name = f"at_{share * 100:.0f}_of_{shards}"
        found[f"{name}_p50_ms"] = fan_out(ms, shards, 0.5)
        found[f"{name}_p99_ms"] = fan_out(ms, shards, 0.99)
        found[f"{name}_hedged_p99_ms"] = hedged(ms, shards, 0.99, rng)
    return found


def measure(server: Server, bodies: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """All figures."""
    peak = load(Job(server.host, server.port, bodies, PEAK_S, PEAK_CONNECTIONS)).per_second
    say(f"peak {peak:,.0f}/s")
    found: dict[str, Any] = {"peak_per_second": peak, "seconds": seconds}
    rng = np.random.default_rng(0)
    for share in SHARES:
        samples = folder / "samples.npy"
        job = Job(server.host, server.port, bodies, seconds, _CONNECTIONS, rate=share * peak, samples=samples)
        result = load(job)
        if result.failed:
            raise BidmatchError(f"{result.failed} requests failed at {share:.0%} of the peak")
        latencies = np.load(samples)[:, 1]
        found[f"at_{share * 100:.0f}_requests"] = len(latencies)
        found |= figures(latencies, share, rng)
        say(f"{share:.0%} of the peak: p99 {found[f'at_{share * 100:.0f}_of_1_p99_ms']:.1f} ms")
    return found


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--seconds", default=120.0, show_default=True, type=click.FloatRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(work: Path, phrases: int, seconds: float, as_json: bool) -> None:
    """Measure one shard, simulate many."""
    raise_file_limit()
    end_in_order()
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bidmatch-shards-") as place:
        folder = Path(place)
        queries = queries_of(work, phrases)
        bundle = bundle_of(work, minilm(phrases), queries)
        bodies = folder / "bodies.jsonl"
        bodies.write_bytes(b"\n".join(orjson.dumps({"query": query, "k": K}) for query in queries))
        with bidmatch("shards", bundle, logs, flags_for(serve_options(), cache_mb=0)) as server:
            found = measure(server, bodies, folder, seconds)
    if as_json:
        emit_json(found)
        return
    for share in SHARES:
        click.echo(f"{share:.0%} of the peak, ms:\n{'shards':>8} {'p50':>8} {'p99':>8} {'p99 hedged':>11}")
        for shards in SHARDS:
            name = f"at_{share * 100:.0f}_of_{shards}"
            values = (found[f"{name}_{kind}_ms"] for kind in ("p50", "p99", "hedged_p99"))
            click.echo(f"{shards:>8} " + " ".join(f"{value:>9.1f}" for value in values))


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
