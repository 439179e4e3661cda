"""What HTTP adds to matching: `/match` on one connection beside the same engine in a loop, one core each.

    python -m bench.match --bundle BUNDLE --queries FILE [--count 2000] [--json]

The peer is the engine itself (tokenise, encode, search, no HTTP) on the same queries in the same run; they
take turns in blocks, so that a busy moment of the machine touches both.
"""

from __future__ import annotations

import http.client
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import numpy as np
import orjson

from bidmatch.base.console import emit_json
from bidmatch.demo.server import serving
from service.engine import Engine

BLOCK = 100


def http_seconds(connection: http.client.HTTPConnection, queries: list[str], k: int) -> list[float]:
    """Seconds of each query's own POST /match on one kept-alive connection."""
    seconds = []
    for query in queries:
        body = orjson.dumps({"query": query, "k": k})
        started = time.perf_counter()
        connection.request("POST", "/match", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        payload = answer.read()
        seconds.append(time.perf_counter() - started)
        if answer.status != 200:
            raise click.ClickException(f"/match answered {answer.status}: {payload[:200]!r}")
    return seconds


def engine_seconds(engine: Engine, queries: list[str], k: int) -> list[float]:
    """Seconds of each query's own `Engine.match`."""
    seconds = []
    for query in queries:
        started = time.perf_counter()
        engine.match([query], k)
        seconds.append(time.perf_counter() - started)
    return seconds


def figures(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, and calls a second."""
    return {
        "p50_ms": 1e3 * statistics.median(seconds),
        "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "per_second": len(seconds) / sum(seconds),
    }


@click.command()
@click.option("--bundle", required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--queries", "file", required=True, type=click.Path(exists=True, path_type=Path), help="One a line."
)
@click.option("--count", type=click.IntRange(BLOCK), default=2000, show_default=True)
@click.option("-k", default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(bundle: Path, file: Path, count: int, k: int, as_json: bool) -> None:
    """Latency of /match and of the engine alone on QUERIES (first column, distinct ones), and their ratio."""
    lines = [line.split("\t")[0] for line in file.read_text(encoding="utf-8").splitlines()]
    queries = list(dict.fromkeys(line for line in lines if line.strip()))[:count]
    engine = Engine.load(bundle)
    over_http: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, serving(bundle, Path(scratch) / "server.log") as url:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80)
        warm = queries[:BLOCK]
        http_seconds(connection, warm, k)
        engine_seconds(engine, warm, k)
        for start in range(0, len(queries), BLOCK):
            block = queries[start : start + BLOCK]
            over_http += http_seconds(connection, block, k)
            alone += engine_seconds(engine, block, k)
    result: dict[str, Any] = {
        "queries": len(queries),
        "phrases": len(engine),
        "http": figures(over_http),
        "engine": figures(alone),
    }
    result["overhead_ms"] = result["http"]["p50_ms"] - result["engine"]["p50_ms"]
    result["p50_ratio"] = result["http"]["p50_ms"] / result["engine"]["p50_ms"]
    if as_json:
        emit_json(result)
        return
    click.echo(
        f"{result['queries']:,} distinct queries one after another, {result['phrases']:,} phrases, k = {k}"
    )
    for name in ("http", "engine"):
        row = result[name]
        click.echo(
            f"{name:8} p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms, {row['per_second']:,.0f}/s"
        )
    click.echo(
        f"HTTP adds {result['overhead_ms']:.2f} ms at the median ({result['p50_ratio']:.2f} times the engine)"
    )


if __name__ == "__main__":
    main()
