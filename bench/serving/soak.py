"""An hour at 70% of the peak while phrases and bundles change: nothing fails, and memory does not grow.

    python -m bench.serving.soak [--json] [--minutes 60] [--work runs/bench-serving]

1,000,000 phrases x 64, MiniLM-L6 in 8 bits, default settings, live phrases on. Requests are distinct (queries
of 12 tokens, k from 5 to 14), so that the cache is full and hardly ever hit. Every minute another bundle
takes over (`POST /admin/reload`); twice a second one of 2,000 live phrases, which are all there before the
load begins, is changed, paused, resumed, removed or added again.

Memory is that of all processes of the service, shared pages counted once; a swap moves it up and down, so
medians are compared: of the five minutes after the first five, and of the last five. Exits with 1 where a
request or a change failed, or memory grew by 2% or more.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import orjson

from bench.serving.bundles import WORK, bundle_of, queries_of, twin_of
from bench.serving.load import Job, finish_load, load, raise_file_limit, start_load
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import minilm
from bench.serving.watch import Watch, call, conclude, median_between
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError

KS = range(5, 15)
LIVE, ADDED_AT_ONCE = 2_000, 200
CHANGE_EVERY_S, MEMORY_EVERY_S = 0.5, 5.0
PEAK_CONNECTIONS, PEAK_S = 64, 10.0
SKIPPED_MINUTES = 5.0
GROWTH_LIMIT = 0.02


class Advertiser:
    """Changes live phrases, one a call.

    Args:
        server: whose.
        texts: to bid on.
    """

    def __init__(self, server: Server, texts: list[str]):
        self._server, self._texts = server, texts
        self._rng = random.Random(0)
        self._states = ["none"] * LIVE
        self.statuses: Counter[str] = Counter()

    def _phrase(self, number: int) -> dict[str, Any]:
        return {"id": f"soak-{number}", "text": self._rng.choice(self._texts)}

    def _call(self, what: str, method: str, path: str, body: Any = None) -> None:
        status, content, _ = call(self._server, method, path, body)
        self.statuses[f"{what} {status}"] += 1
        if status != 200:
            say(f"{method} {path}: {status} {content[:300]!r}")

    def add_all(self) -> None:
        """All of them, in a few requests."""
        for start in range(0, LIVE, ADDED_AT_ONCE):
            numbers = range(start, start + ADDED_AT_ONCE)
            self._call("add", "POST", "/phrases", {"phrases": [self._phrase(number) for number in numbers]})
        self._states = ["active"] * LIVE

    def change_one(self) -> None:
        """One of them: what may be done with it depends on its state."""
        number = self._rng.randrange(LIVE)
        path = f"/phrases/soak-{number}"
        state, draw = self._states[number], self._rng.random()
        if state == "removed" or draw < 0.6:
            self._call("add", "POST", "/phrases", {"phrases": [self._phrase(number)]})
            # Whether a changed phrase stays paused is the service's affair; it is resumed to be sure.
            if state == "paused":
                self._call("resume", "POST", f"{path}/resume")
            self._states[number] = "active"
        elif draw < 0.75:
            self._call("remove", "DELETE", path)
            self._states[number] = "removed"
        elif state == "paused":
            self._call("resume", "POST", f"{path}/resume")
            self._states[number] = "active"
        else:
            self._call("pause", "POST", f"{path}/pause")
            self._states[number] = "paused"


class Swaps:
    """Lets two bundles take turns.

    Args:
        server: whose.
        bundles: the two; the first is being served.
    """

    def __init__(self, server: Server, bundles: tuple[Path, Path]):
        self._server, self._bundles = server, bundles
        self._turn = 0
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []

    def swap(self) -> None:
        """The other one takes over."""
        self._turn += 1
        bundle = str(self._bundles[self._turn % 2].resolve())
        status, content, seconds = call(
            self._server, "POST", "/admin/reload", {"bundle": bundle}, timeout=300
        )
        self.statuses[str(status)] += 1
        self.seconds.append(seconds)
        if status != 200:
            say(f"POST /admin/reload: {status} {content[:300]!r}")


def soak(
    server: Server,
    bundles: tuple[Path, Path],
    queries: list[str],
    scratch: Path,
    minutes: float,
    swap_every: float,
) -> dict[str, Any]:
    """The figures."""
    bodies = scratch / "bodies.jsonl"
    bodies.write_bytes(b"\n".join(orjson.dumps({"query": query, "k": k}) for k in KS for query in queries))
    samples = scratch / "samples.npy"
    peak = load(Job(server.host, server.port, bodies, PEAK_S, PEAK_CONNECTIONS)).per_second
    rate = 0.7 * peak
    say(f"peak {peak:,.0f}/s; now {rate:,.0f}/s for {minutes:g} minutes")
    advertiser, swaps = Advertiser(server, queries), Swaps(server, bundles)
    advertiser.add_all()
    job = Job(
        server.host, server.port, bodies, 60 * minutes, 256, rate=rate, first=len(queries), samples=samples
    )
    process = start_load(job)
    try:
        with (
            Watch(server.memory, MEMORY_EVERY_S) as memory,
            Watch(advertiser.change_one, CHANGE_EVERY_S) as changes,
            Watch(swaps.swap, swap_every),
        ):
            met = finish_load(process)
    finally:
        process.kill()
    window = min(SKIPPED_MINUTES, minutes / 3) * 60
    end = met.begun + 60 * minutes
    early = (met.begun + window, met.begun + 2 * window)
    late = (end - window, end)
    due, latency, _ = np.load(samples).T
    return {
        "minutes": minutes,
        "peak_per_second": peak,
        "offered_per_second": rate,
        "statuses": met.statuses,
        "failed": met.failed,
        "p50_ms": met.p50_ms,
        "p99_ms": met.p99_ms,
        "p999_ms": met.p999_ms,
        "max_ms": met.max_ms,
        "p99_early_ms": 1e3 * float(np.percentile(latency[due < window], 99)),
        "p99_late_ms": 1e3 * float(np.percentile(latency[due >= 60 * minutes - window], 99)),
        "changes": len(changes.seen),
        "change_statuses": dict(advertiser.statuses),
        "swaps": len(swaps.seconds),
        "swap_statuses": dict(swaps.statuses),
        "swap_median_s": float(np.median(swaps.seconds)),
        "swap_max_s": max(swaps.seconds),
        "compared_minutes": window / 60,
        **{
            f"memory_{field}_{name}_mb": median_between(memory.seen, *times, field) / 1e6
            for field in ("all", "anonymous")
            for name, times in (("early", early), ("late", late))
        },
        "memory_growth": median_between(memory.seen, *late, "all")
        / median_between(memory.seen, *early, "all")
        - 1,
        "memory_anonymous_by_minute_mb": [
            median_between(memory.seen, moment, moment + 60, "anonymous") / 1e6
            for moment in np.arange(met.begun, end - 30, 60)
        ],
        "memory_max_mb": max(value["all"] for _, value in memory.seen) / 1e6,
        "generator_cpus": met.cpu_share,
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = []
    if result["failed"]:
        found.append(f"{result['failed']} requests failed: {result['statuses']}")
    for name in ("change_statuses", "swap_statuses"):
        bad = {what: count for what, count in result[name].items() if not what.endswith("200")}
        if bad:
            found.append(f"{name}: {bad}")
    if result["memory_growth"] >= GROWTH_LIMIT:
        found.append(f"memory grew by {result['memory_growth']:.2%}")
    return found


def show(result: dict[str, Any]) -> None:
    """The figures for people."""
    of = SimpleNamespace(**result)
    click.echo(
        f"{of.offered_per_second:,.0f} requests/s, 70% of the peak, for {of.minutes:g} minutes: "
        f"{of.statuses}, {of.failed} failed\n"
        f"p50 {of.p50_ms:.1f} ms, p99 {of.p99_ms:.1f} ms, p99.9 {of.p999_ms:.1f} ms; p99 at first "
        f"{of.p99_early_ms:.1f} ms, at last {of.p99_late_ms:.1f} ms\n"
        f"{of.swaps} swaps, {of.swap_median_s:.1f} s at the median; {of.changes:,} changes of live phrases: "
        f"{of.change_statuses}\n"
        f"memory {of.memory_all_early_mb:,.0f} MB after the first {of.compared_minutes:g} minutes, "
        f"{of.memory_all_late_mb:,.0f} MB at last ({of.memory_growth:+.2%}), of it anonymous "
        f"{of.memory_anonymous_early_mb:,.0f} and {of.memory_anonymous_late_mb:,.0f} MB"
    )


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--minutes", default=60.0, show_default=True, type=click.FloatRange(0.5))
@click.option("--swap-seconds", default=60.0, show_default=True, help="From one swap to the next.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(work: Path, phrases: int, minutes: float, swap_seconds: float, workers: int, as_json: bool) -> None:
    """The service for an hour, with swaps and live phrases."""
    raise_file_limit()
    end_in_order()
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bidmatch-soak-") as folder:
        scratch = Path(folder)
        queries = queries_of(work, phrases)
        recipe = minilm(phrases)
        bundles = bundle_of(work, recipe, queries), twin_of(work, recipe)
        flags = flags_for(serve_options(), workers=workers, live=scratch / "live")
        with bidmatch("soak", bundles[0], logs, flags) as server:
            result = soak(server, bundles, queries, scratch, minutes, swap_seconds)
    conclude(result, show, faults(result), as_json=as_json)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
