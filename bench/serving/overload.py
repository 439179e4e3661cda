"""Five times more load than the service can carry, for a minute: its answers, its memory, its recovery.

    python -m bench.serving.overload [--json] [--seconds 60] [--times 5] [--work runs/bench-serving]

1,000,000 phrases x 64, MiniLM-L6 in 8 bits, distinct queries, cache off. The peak is measured first; then
arrivals come on a clock at five times that rate, on so many connections that none has to wait for one.
Meanwhile probes and /metrics are asked twice a second, and from before to after the load a single request
every 50 ms, which shows when the service is itself again: the first moment from which on all of these are
answered 200 within twice the 99th percentile of before.

Exits with 1 where a request got another answer than 200 or 429, the 99th percentile of accepted ones is
beyond the deadline, memory grew by more than 2%, or recovery took more than 2 s.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import orjson

from bench.serving.bundles import WORK, K, bundle_of, queries_of
from bench.serving.load import Job, Load, finish_load, load, raise_file_limit, start_load
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import minilm
from bench.serving.watch import Watch, calls_to, conclude, median_between, of_calls
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError

PEAK_CONNECTIONS, PEAK_S, CALM_S = 64, 8.0, 5.0
SINGLE_EVERY_S, PROBE_EVERY_S, MEMORY_EVERY_S = 0.05, 0.5, 1.0
# Of the load's first seconds: until the queue has filled, memory has not.
SETTLING_S = 5.0
GROWTH_LIMIT, RECOVERY_LIMIT_S = 0.02, 2.0


def deadline_ms(server: Server) -> int:
    """The deadline that the server has said it was set to.

    Raises:
        BidmatchError: it has not said any.
    """
    said = re.search(r"^setting deadline_ms = (\d+)", server.said(), re.MULTILINE)
    if said is None:
        raise BidmatchError("the server does not say its deadline")
    return int(said[1])


def recovery_s(singles: list[tuple[float, tuple[int, float]]], end: float, limit_s: float) -> float | None:
    """Seconds from `end` to the first request from which on all are answered 200 within `limit_s`.

    None where even the last is not.
    """
    after = [
        (moment, status == 200 and taken <= limit_s) for moment, (status, taken) in singles if moment >= end
    ]
    well = list(itertools.takewhile(lambda one: one[1], reversed(after)))
    return well[-1][0] - end if well else None


def overload(
    server: Server, bodies: Path, scratch: Path, seconds: float, times: float, connections: int
) -> dict[str, Any]:
    """The figures."""
    lines = itertools.cycle(bodies.read_bytes().splitlines())

    def job(duration: float, count: int, rate: float | None = None) -> Job:
        samples = scratch / "samples.npy"
        return Job(server.host, server.port, bodies, duration, count, rate=rate, samples=samples)

    peak = load(job(PEAK_S, PEAK_CONNECTIONS)).per_second
    calm = load(job(CALM_S, 1))
    say(f"peak {peak:,.0f}/s; now {times * peak:,.0f}/s for {seconds:g} s")
    single = calls_to(server, "POST", "/match", lambda: orjson.loads(next(lines)))
    with (
        Watch(server.memory, MEMORY_EVERY_S) as memory,
        Watch(single, SINGLE_EVERY_S) as singles,
        Watch(calls_to(server, "GET", "/readyz"), PROBE_EVERY_S) as probes,
        Watch(calls_to(server, "GET", "/metrics"), PROBE_EVERY_S) as metrics,
    ):
        time.sleep(CALM_S)
        process = start_load(job(seconds, connections, times * peak))
        try:
            met = finish_load(process)
        finally:
            process.kill()
        time.sleep(2 * CALM_S)
    end = met.begun + seconds
    before = [taken for moment, (_, taken) in singles.seen if moment < met.begun - 1.5]
    limit_s = 2 * float(np.percentile(before, 99))
    held = median_between(memory.seen, met.begun + SETTLING_S, met.begun + 2 * SETTLING_S, "all")
    late = median_between(memory.seen, end - SETTLING_S, end, "all")
    recovered = recovery_s(singles.seen, end, limit_s)
    return {
        "peak_per_second": peak,
        "offered_per_second": met.due / seconds,
        "seconds": seconds,
        "times": times,
        "connections": connections,
        "statuses": met.statuses,
        "other_answers": _others(met),
        "unanswered": met.unanswered,
        "broken": met.broken,
        "waited_for_a_connection": met.waited,
        "accepted_per_second": met.per_second,
        "accepted_share_of_peak": met.per_second / peak,
        "accepted_p50_ms": met.p50_ms,
        "accepted_p99_ms": met.p99_ms,
        "accepted_max_ms": met.max_ms,
        "refused_p99_ms": _refused_p99(scratch / "samples.npy"),
        "deadline_ms": deadline_ms(server),
        "calm_p50_ms": calm.p50_ms,
        "calm_p99_ms": calm.p99_ms,
        "memory_before_mb": median_between(memory.seen, 0, met.begun - 1, "all") / 1e6,
        "memory_early_mb": held / 1e6,
        "memory_late_mb": late / 1e6,
        "memory_after_mb": memory.seen[-1][1]["all"] / 1e6,
        "memory_growth": late / held - 1,
        "recovery_s": recovered,
        "well_again_within_ms": 1e3 * limit_s,
        "generator_cpus": met.cpu_share,
        **{f"readyz_{name}": value for name, value in of_calls(probes.seen).items()},
        **{f"metrics_{name}": value for name, value in of_calls(metrics.seen).items()},
    }


def _others(met: Load) -> int:
    return sum(count for status, count in met.statuses.items() if status not in ("200", "429"))


def _refused_p99(samples: Path) -> float:
    """The 99th percentile of the latency of 429 answers, in milliseconds; NaN without any."""
    _, latency, status = np.load(samples).T
    refused = latency[status == 429]
    return 1e3 * float(np.percentile(refused, 99)) if len(refused) else float("nan")


def faults(result: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = []
    if result["other_answers"] or result["unanswered"] or result["broken"]:
        found.append(
            f"answers other than 200 and 429: {result['statuses']}, {result['unanswered']} unanswered, "
            f"{result['broken']} broken connections"
        )
    if not result["accepted_p99_ms"] <= result["deadline_ms"]:
        found.append(f"p99 of accepted requests {result['accepted_p99_ms']:.0f} ms, beyond the deadline")
    if result["memory_growth"] > GROWTH_LIMIT:
        found.append(f"memory grew by {result['memory_growth']:.1%}")
    if result["recovery_s"] is None or result["recovery_s"] > RECOVERY_LIMIT_S:
        found.append(f"recovery took {result['recovery_s']} s")
    for name in ("readyz", "metrics"):
        if set(result[f"{name}_statuses"]) != {"200"}:
            found.append(f"/{name} was answered {result[f'{name}_statuses']}")
    if not result["statuses"].get("429"):
        found.append("nothing was refused, so there was no overload")
    if result["waited_for_a_connection"]:
        found.append(f"{result['waited_for_a_connection']} requests waited for a connection: use more")
    return found


def show(result: dict[str, Any]) -> None:
    """The figures for people."""
    of = SimpleNamespace(**result)
    click.echo(
        f"{of.offered_per_second:,.0f} requests/s for {of.seconds:g} s, {of.times:g} times the peak of "
        f"{of.peak_per_second:,.0f}/s: {of.statuses}, {of.unanswered} unanswered\n"
        f"accepted {of.accepted_per_second:,.0f}/s ({of.accepted_share_of_peak:.0%} of the peak): p50 "
        f"{of.accepted_p50_ms:.0f} ms, p99 {of.accepted_p99_ms:.0f} ms, deadline {of.deadline_ms} ms; "
        f"refused within {of.refused_p99_ms:.1f} ms at p99\n"
        f"memory {of.memory_before_mb:,.0f} MB before, {of.memory_early_mb:,.0f} MB when loaded, "
        f"{of.memory_late_mb:,.0f} MB at its end ({of.memory_growth:+.2%}), {of.memory_after_mb:,.0f} MB "
        f"after\nrecovered after {of.recovery_s} s; /readyz {of.readyz_statuses}, slowest "
        f"{of.readyz_max_ms:.0f} ms; /metrics {of.metrics_statuses}, slowest {of.metrics_max_ms:.0f} ms"
    )


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(3 * SETTLING_S))
@click.option("--times", default=5.0, show_default=True, help="Of the peak.")
@click.option("--connections", default=2048, show_default=True, type=click.IntRange(1))
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(
    work: Path, phrases: int, seconds: float, times: float, connections: int, workers: int, as_json: bool
) -> None:
    """The service under more load than it can carry."""
    raise_file_limit()
    end_in_order()
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bidmatch-overload-") as folder:
        scratch = Path(folder)
        queries = queries_of(work, phrases)
        bundle = bundle_of(work, minilm(phrases), queries)
        bodies = scratch / "bodies.jsonl"
        bodies.write_bytes(b"\n".join(orjson.dumps({"query": query, "k": K}) for query in queries))
        flags = flags_for(serve_options(), workers=workers, cache_mb=0)
        with bidmatch("overload", bundle, logs, flags) as server:
            result = overload(server, bodies, scratch, seconds, times, connections)
    conclude(result, show, faults(result), as_json=as_json)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
