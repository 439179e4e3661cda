"""200 swaps of the bundle under load: no request may fail.

    python -m bench.serving.swaps [--json] [--swaps 200] [--workers 1] [--work runs/bench-serving]

1,000,000 phrases x 64, MiniLM-L6 in 8 bits, distinct queries, cache off, 2,000 live phrases. Requests come on
a clock at half the peak that is measured first, while two bundles of the same content and different ids take
turns, one swap after the other (`POST /admin/reload`), with a pause in between. A request has failed where it
got no answer, or another than 200: one that took longer than its deadline is answered 504.

`--bundle` names other bundles than the ones that this makes: two that take turns, or one that takes over from
itself. Exits with 1 where a request or a swap failed, or the service's open files grew.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import orjson

from bench.serving.bundles import WORK, K, bundle_of, queries_of, twin_of
from bench.serving.load import Job, load, raise_file_limit
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import minilm
from bench.serving.watch import call, conclude
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError

PEAK_CONNECTIONS, PEAK_S, CONNECTIONS, ROUND_S = 64, 8.0, 256, 20.0
SHARE_OF_PEAK = 0.5
LIVE = 2_000


class Turns(threading.Thread):
    """Lets bundles take turns, one swap after the other.

    Args:
        server: whose.
        bundles: the first is being served.
        count: of swaps.
        pause: seconds from the end of one to the next.

    Attributes:
        statuses: status -> swaps.
        seconds: of each swap.
        files: files that the service's processes had open after each.
        memory: resident bytes after each, see `Server.memory`.
    """

    def __init__(self, server: Server, bundles: list[Path], count: int, pause: float):
        super().__init__(daemon=True)
        self._server, self._bundles, self._count, self._pause = server, bundles, count, pause
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.files: list[int] = []
        self.memory: list[int] = []

    def run(self) -> None:
        """Swap, swap, swap."""
        for turn in range(1, self._count + 1):
            bundle = str(self._bundles[turn % len(self._bundles)].resolve())
            status, content, seconds = call(
                self._server, "POST", "/admin/reload", {"bundle": bundle}, timeout=600
            )
            if status != 200:
                say(f"POST /admin/reload: {status} {content[:300]!r}")
            self.statuses[str(status)] += 1
            self.seconds.append(seconds)
            self.files.append(open_files(self._server))
            self.memory.append(self._server.memory()["anonymous"])
            time.sleep(self._pause)


def open_files(server: Server) -> int:
    """Files that the server's processes have open, connections left out."""
    found = 0
    for pid in server.pids():
        try:
            found += sum(
                not str(entry.readlink()).startswith("socket:") for entry in Path(f"/proc/{pid}/fd").iterdir()
            )
        except OSError:  # closed, or ended, meanwhile
            continue
    return found


def swaps(
    server: Server, bundles: list[Path], bodies: Path, scratch: Path, count: int, pause: float
) -> dict[str, Any]:
    """The figures."""
    samples = scratch / "samples.npy"
    peak = load(Job(server.host, server.port, bodies, PEAK_S, PEAK_CONNECTIONS)).per_second
    rate = SHARE_OF_PEAK * peak

    def loaded(seconds: float, first: int) -> tuple[Any, np.ndarray]:
        met = load(
            Job(
                server.host,
                server.port,
                bodies,
                seconds,
                CONNECTIONS,
                rate=rate,
                first=first,
                seed=first,
                samples=samples,
            )
        )
        return met, np.load(samples)[:, 1]

    calm, calm_latency = loaded(PEAK_S, 0)
    say(f"peak {peak:,.0f}/s; now {count} swaps at {rate:,.0f}/s")
    turns = Turns(server, bundles, count, pause)
    turns.start()
    statuses: Counter[str] = Counter()
    failed, due, slowest, latencies = 0, 0, 0.0, []
    while turns.is_alive():
        met, latency = loaded(ROUND_S, calm.due + due)
        statuses.update(met.statuses)
        failed, due = failed + met.failed, due + met.due
        slowest = max(slowest, met.max_ms)
        latencies.append(latency)
        say(f"{len(turns.seconds)} swaps, {due:,} requests, {failed} failed")
    latency = np.concatenate(latencies)
    settled = min(10, count // 2)
    return {
        "swaps": count,
        "swap_statuses": dict(turns.statuses),
        "swap_median_s": float(np.median(turns.seconds)),
        "swap_max_s": max(turns.seconds),
        "peak_per_second": peak,
        "offered_per_second": rate,
        "requests": due,
        "statuses": dict(statuses),
        "failed": failed,
        "p50_ms": 1e3 * float(np.percentile(latency, 50)),
        "p99_ms": 1e3 * float(np.percentile(latency, 99)),
        "p999_ms": 1e3 * float(np.percentile(latency, 99.9)),
        "max_ms": slowest,
        "calm_p99_ms": 1e3 * float(np.percentile(calm_latency, 99)),
        "files_early": int(np.median(turns.files[:settled])),
        "files_late": int(np.median(turns.files[-settled:])),
        "anonymous_early_mb": float(np.median(turns.memory[settled : 2 * settled])) / 1e6,
        "anonymous_late_mb": float(np.median(turns.memory[-settled:])) / 1e6,
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = []
    if result["failed"]:
        found.append(f"{result['failed']} requests failed: {result['statuses']}")
    if set(result["swap_statuses"]) != {"200"}:
        found.append(f"swaps failed: {result['swap_statuses']}")
    # Between a swap and the last answer of the bundle before, the files of both are open.
    if result["files_late"] > 2 * result["files_early"]:
        found.append(f"open files grew from {result['files_early']} to {result['files_late']}")
    return found


def show(result: dict[str, Any]) -> None:
    """The figures for people."""
    of = SimpleNamespace(**result)
    click.echo(
        f"{of.swaps} swaps: {of.swap_statuses}, {of.swap_median_s:.2f} s at the median, "
        f"{of.swap_max_s:.2f} s at most\n{of.requests:,} requests at {of.offered_per_second:,.0f}/s, "
        f"half the peak: {of.statuses}, {of.failed} failed"
        f"\np50 {of.p50_ms:.1f} ms, p99 {of.p99_ms:.1f} ms ({of.calm_p99_ms:.1f} ms "
        f"without swaps), p99.9 {of.p999_ms:.1f} ms, slowest {of.max_ms:.0f} ms\nopen files "
        f"{of.files_early} at first, "
        f"{of.files_late} at last; anonymous memory {of.anonymous_early_mb:,.0f} MB and "
        f"{of.anonymous_late_mb:,.0f} MB"
    )


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--bundle", "given", multiple=True, type=click.Path(path_type=Path), help="Once or twice.")
@click.option("--swaps", "count", default=200, show_default=True, type=click.IntRange(2))
@click.option("--pause", default=0.5, show_default=True, help="Seconds between two swaps.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(
    work: Path,
    phrases: int,
    given: tuple[Path, ...],
    count: int,
    pause: float,
    workers: int,
    as_json: bool,
) -> None:
    """Swaps of the bundle under load."""
    raise_file_limit()
    end_in_order()
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bidmatch-swaps-") as folder:
        scratch = Path(folder)
        queries = queries_of(work, phrases)
        recipe = minilm(phrases)
        bundles = list(given) or [bundle_of(work, recipe, queries), twin_of(work, recipe)]
        bodies = scratch / "bodies.jsonl"
        bodies.write_bytes(b"\n".join(orjson.dumps({"query": query, "k": K}) for query in queries))
        flags = flags_for(serve_options(), workers=workers, cache_mb=0, live=scratch / "live")
        with bidmatch("swaps", bundles[0], logs, flags) as server:
            for start in range(0, LIVE, 1000):
                added = [
                    {"id": f"live-{number}", "text": f"{queries[number % len(queries)]} {number}"}
                    for number in range(start, min(LIVE, start + 1000))
                ]
                status, content, _ = call(server, "POST", "/phrases", {"phrases": added})
                if status != 200:
                    raise BidmatchError(f"POST /phrases: {status} {content[:300]!r}")
            result = swaps(server, bundles, bodies, scratch, count, pause)
    conclude(result, show, faults(result), as_json=as_json)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
