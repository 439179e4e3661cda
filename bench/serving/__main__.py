"""What /match does under load on this machine, beside its own ceiling and beside other services.

    python -m bench.serving [--json] [--quick] [--work runs/bench-serving] [--rounds 5]

On two cores the run takes under a quarter of an hour, once the bundles are made (`bench.serving.bundles`,
some minutes, the first time only). Server and load generator (`bench.serving.load`) share the processors; the
table shows the generator's share, and its own ceiling is measured, too.

1. 1,000,000 phrases x 64, MiniLM-L6 in 8 bits, distinct queries of 12 tokens, cache off: the peak of /match
   beside the engine alone in a tight loop (`ceiling_ratio`), beside a FastAPI service with
   sentence-transformers and hnswlib (`naive_throughput_ratio`, `naive_p99_ratio`) and beside one in front of
   infinity-emb, over the same index. With the `bag` encoder beside an empty FastAPI route that returns the
   same bytes (`bag_route_ratio`).
2. Arrivals on a clock at 50%, 70% and 90% of that peak (`p99_at_70_ratio`: p99 at 70% over the median of
   single requests), and what the service adds to a single query (`overhead_ms`).
3. Cache hits beside the empty route (`cache_ratio`).

Everything takes its turn in every round, and servers that are not measured are stopped meanwhile. What they
say is in WORK/logs. Exits with 1 where a figure misses what is wanted of it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from bench.serving import peers
from bench.serving.bundles import WORK, K, bundle_of, heads_of, hnswlib_of, queries_of
from bench.serving.ceiling import engine_alone
from bench.serving.figures import figures_of, missed, table
from bench.serving.load import raise_file_limit
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import bag, minilm, wide
from bench.serving.rounds import (
    Measurement,
    Settings,
    Target,
    Targets,
    answers_of,
    measure_round,
    overlap,
    tune_ceiling,
)
from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import BidmatchError
from export.bundle.read import read_manifest

OVERLAPPING = 200
REPEATED, DRAWN = 1_000, 20_000
ZIPF = 1.0


@dataclass(frozen=True)
class Files:
    """What is served and asked.

    Attributes:
        minilm: bundle.
        index: hnswlib's, of the MiniLM bundle.
        heads: likewise.
        bag: bundle.
        wide: bundle.
        queries: one a line.
        bodies: a body for each query.
        repeated: bodies of the first 1,000 queries.
        drawn: 20,000 bodies drawn from these by Zipf's law.
    """

    minilm: Path
    index: Path
    heads: Path
    bag: Path
    wide: Path
    queries: Path
    bodies: Path
    repeated: Path
    drawn: Path


def prepare(work: Path, scratch: Path, phrases: int, bag_phrases: int) -> Files:
    """The bundles, made where they are not there, and the bodies."""
    work.mkdir(parents=True, exist_ok=True)
    queries = queries_of(work, phrases)
    names = ("queries.txt", "bodies.jsonl", "repeated.jsonl", "drawn.jsonl")
    listed, bodies, repeated, drawn = (scratch / name for name in names)
    lines = [orjson.dumps({"query": query, "k": K}) for query in queries]
    ranks = np.arange(1, min(REPEATED, len(lines)) + 1)
    shares = ranks**-ZIPF / (ranks**-ZIPF).sum()
    picks = np.random.default_rng(0).choice(len(ranks), DRAWN, p=shares)
    listed.write_text("\n".join(queries), encoding="utf-8")
    bodies.write_bytes(b"\n".join(lines))
    repeated.write_bytes(b"\n".join(lines[: len(ranks)]))
    drawn.write_bytes(b"\n".join(lines[pick] for pick in picks))
    recipe = minilm(phrases)
    return Files(
        bundle_of(work, recipe, queries),
        hnswlib_of(work, recipe),
        heads_of(work, recipe),
        bundle_of(work, bag(bag_phrases), queries),
        bundle_of(work, wide(bag_phrases), queries),
        listed,
        bodies,
        repeated,
        drawn,
    )


class Stage:
    """Starts servers, each stopped where it stands until it is measured, and ends them all.

    Args:
        files: what they serve.
        logs: folder for what they say.
        workers: processes of each of ours and of the empty route.
        stack: ends them.
    """

    def __init__(self, files: Files, logs: Path, workers: int, stack: ExitStack):
        self._files, self._logs, self._workers, self._stack = files, logs, workers, stack
        self._options = serve_options()
        self._peer = peers.Peer(files.minilm, files.index, files.heads)

    @property
    def has_cache(self) -> bool:
        """Whether this `bidmatch serve` has one."""
        return "--cache-mb" in self._options

    def _paused(self, starting: AbstractContextManager[Server]) -> Server:
        server = self._stack.enter_context(starting)
        server.pause()
        return server

    def ours(self, name: str, bundle: Path, *, cache: bool = False) -> Server:
        """`bidmatch serve` with its default settings, but for the cache."""
        settings = {"workers": self._workers} | ({} if cache else {"cache_mb": 0})
        return self._paused(bidmatch(name, bundle, self._logs, flags_for(self._options, **settings)))

    def naives(self) -> list[Target]:
        """The naive service with the threads that torch takes, and with one."""
        return [
            Target(
                f"naive, torch's threads: {threads or 'its own choice'}",
                self._paused(peers.naive(self._peer, self._logs, threads)),
                self._files.bodies,
                tried=(1, 8, 32),
            )
            for threads in (None, 1)
        ]

    def infinity(self) -> Target:
        """The gateway and infinity-emb."""
        servers = self._stack.enter_context(peers.infinity(self._peer, self._logs))
        for server in servers:
            server.pause()
        gateway, embedder = servers
        return Target("infinity-emb", gateway, self._files.bodies, (embedder,), tried=(8, 32, 64))

    def route(self, answer: Path) -> Target:
        """The empty route that returns these bytes."""
        server = self._paused(peers.route(answer, self._logs, self._workers))
        return Target("empty route", server, self._files.bodies)

    def cached(self, tuning: Measurement) -> Target:
        """Ours with all answers in its cache that it will be asked for."""
        server = self.ours("cached", self._files.bag, cache=True)
        once = Target("bidmatch, filling its cache", server, self._files.repeated)
        for _ in range(2):  # where a first connection did not reach a worker, a second one may
            tuning.put(once, 2 * tuning.settings.tuning_s, 32, warm_up=0)
        return Target("bidmatch, cache hits", server, self._files.drawn)


@contextmanager
def started(
    files: Files, scratch: Path, logs: Path, settings: Settings, workers: int, *, with_infinity: bool
) -> Iterator[tuple[Targets, dict[str, Any]]]:
    """All servers, tuned and stopped, and what was found on the way.

    Raises:
        BidmatchError: one does not start.
    """
    tuning = Measurement(settings, scratch)
    bodies = files.repeated.read_bytes().splitlines()[:OVERLAPPING]
    with ExitStack() as stack:
        say("starting the servers")
        stage = Stage(files, logs, workers, stack)
        engine = stack.enter_context(engine_alone(files.minilm, files.queries, settings.k))
        heavy = Target("bidmatch", stage.ours("minilm", files.minilm), files.bodies, tried=(16, 32, 64, 128))
        small = Target("bidmatch, bag", stage.ours("bag", files.bag), files.bodies)
        wider = Target("bidmatch, bag re-scored", stage.ours("wide", files.wide), files.bodies)
        naives = stage.naives()
        infinity = stage.infinity() if with_infinity else None
        answers = sorted(answers_of(small, bodies), key=len)
        answer = scratch / "answer.json"
        answer.write_bytes(answers[len(answers) // 2])
        route = stage.route(answer)
        if not stage.has_cache:
            say("this `bidmatch serve` has no cache, so there are no cache hits to measure")
        cached = stage.cached(tuning) if stage.has_cache else None
        ids = engine.ids(0, OVERLAPPING)
        said: dict[str, Any] = {
            "answer_bytes": len(answer.read_bytes()),
            "generator_ceiling_per_second": _generator_ceiling(answer, files, logs, tuning),
        }
        for name, target in (("ours", heavy), ("naive", naives[0]), ("infinity", infinity)):
            if target is not None:
                said[f"{name}_overlap_at_10"] = overlap(target, bodies, ids)
        batch = tune_ceiling(engine, settings)
        for target in (heavy, small, wider, route, cached):
            if target is not None:
                tuning.tune(target, settings.tuning_s)
        for target in (*naives, infinity):  # they answer in bursts, which a short time would cut
            if target is not None:
                tuning.tune(target, settings.closed_s)
        naive = max(naives, key=lambda target: target.tuned)
        said |= {
            "ceiling_batch": batch,
            "ours_connections": heavy.connections,
            "naive_connections": naive.connections,
            "naive_one_thread": naive is naives[1],
        }
        yield Targets(engine, batch, heavy, naive, infinity, small, wider, route, cached), said


def _generator_ceiling(answer: Path, files: Files, logs: Path, tuning: Measurement) -> float:
    with peers.bare(answer, logs) as server:
        target = Target("bare socket", server, files.bodies)
        return tuning.put(target, tuning.settings.tuning_s, 32).per_second


def about(files: Files, settings: Settings, workers: int) -> dict[str, Any]:
    """What was measured, for who reads the figures."""
    manifest = read_manifest(files.minilm)
    return {
        "phrases": manifest.counts.phrases,
        "dim": manifest.dim,
        "ef": manifest.index.ef,
        "recall_at_10": manifest.index.recall,
        "queries": len(files.queries.read_text(encoding="utf-8").splitlines()),
        "bag_phrases": read_manifest(files.bag).counts.phrases,
        "k": settings.k,
        "rounds": settings.rounds,
        "connections": settings.connections,
        "workers": workers,
        "cores": settings.cores,
        "load_generator": "bench.serving.load",
    }


def measure(
    work: Path, settings: Settings, phrases: int, bag_phrases: int, workers: int, *, with_infinity: bool
) -> dict[str, Any]:
    """The whole run: a flat object of figures."""
    raise_file_limit()
    end_in_order()
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bidmatch-serving-") as folder:
        scratch = Path(folder)
        files = prepare(work, scratch, phrases, bag_phrases)
        begun = time.monotonic()
        found = Measurement(settings, scratch)
        with started(files, scratch, logs, settings, workers, with_infinity=with_infinity) as (targets, said):
            for number in range(settings.rounds):
                measure_round(targets, found, backwards=number % 2 == 1)
                say(f"round {number + 1} of {settings.rounds} done, {time.monotonic() - begun:.0f} s in all")
        seconds = time.monotonic() - begun
        return about(files, settings, workers) | said | figures_of(found) | {"seconds": round(seconds, 1)}


@click.command()
@click.option(
    "--work", default=WORK, show_default=True, type=click.Path(path_type=Path), help="Folder of the bundles."
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--bag-phrases", default=100_000, show_default=True, type=click.IntRange(1000))
@click.option(
    "--connections", default=32, show_default=True, type=click.IntRange(1), help="Where p99 is compared."
)
@click.option(
    "--workers", default=1, show_default=True, type=click.IntRange(1), help="Processes of a service."
)
@click.option("--closed-seconds", default=5.0, show_default=True, help="Of each closed loop.")
@click.option("--open-seconds", default=12.0, show_default=True, help="Of each open loop.")
@click.option("--http-seconds", default=3.0, show_default=True, help="Of each closed loop beside the route.")
@click.option("--without-infinity", is_flag=True, help="Leave out infinity-emb, which has to be installed.")
@click.option(
    "--quick", is_flag=True, help="One short round over few phrases: tries it out, measures little."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(
    work: Path,
    rounds: int,
    phrases: int,
    bag_phrases: int,
    connections: int,
    workers: int,
    closed_seconds: float,
    open_seconds: float,
    http_seconds: float,
    without_infinity: bool,
    quick: bool,
    as_json: bool,
) -> None:
    """Throughput and latency of /match beside its ceiling, its peers and an empty route."""
    if quick:
        phrases = bag_phrases = 20_000
        rounds, closed_seconds, open_seconds, http_seconds = 1, 2.0, 3.0, 1.0
    cores = len(os.sched_getaffinity(0))
    settings = Settings(
        rounds, closed_seconds, open_seconds, http_seconds, min(2.0, http_seconds), connections, K, cores
    )
    result = measure(work, settings, phrases, bag_phrases, workers, with_infinity=not without_infinity)
    if as_json:
        emit_json(result)
    else:
        table(result, click.echo)
    if missed(result) and not quick:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
