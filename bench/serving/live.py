"""What live phrases cost a match, whether any is lost or late, and what a filter finds.

    python -m bench.serving.live [--json] [--work runs/bench-serving] [--rounds 5] [--seconds 300]

1. Latency of /match with 100,000 live phrases beside that without any: two servers of the same settings
   (cache off, so that every request searches), in turns, the one that is not measured stopped. With MiniLM-L6
   over 1,000,000 phrases (`live_ratio`) and with the `bag` encoder over 100,000, where search is most of the
   work (`bag_live_ratio`): medians of single requests, and under load (`live_loaded_p50_ratio`).
2. For five minutes 32 clients (`bench.serving.advertisers`) add, change, pause, resume and remove phrases,
   search and filter at once: errors, lost and ghost phrases, answers that no rule allows, and recall against
   exact search over all phrases that are active, at six moments (`recall_10`, `recall_100`).
3. Recall@100 of filtered search against exact search over 1,000,000 phrases: 50%, 10%, 1%, 0.1% and 0.001% of
   them allowed, at random and those farthest from the query (`filter_recall`, `far_filter_recall`).

Exits with 1 where a figure misses what is wanted of it.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import orjson
import pyarrow as pa

from bench.serving.advertisers import columns_of, words_of
from bench.serving.bundles import WORK, K, bundle_of, queries_of
from bench.serving.crowd import crowd, metric
from bench.serving.figures import ratios, spread
from bench.serving.load import Job, load, raise_file_limit
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import Recipe, bag, minilm
from bench.serving.watch import call, conclude
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError
from bidmatch.base.files import atomic_dir
from bidmatch.demo.inventory import inventory
from export.bundle import format as fmt
from export.bundle.read import open_bundle, read_manifest
from export.bundle.write import finish, write_phrases
from service.engine import Engine
from service.live.store import SCHEMA_VERSION, LiveStore
from service.options import MatchOptions
from service.rules.filters import parse_filter

RATIO_LIMIT, RECALL_LIMIT = 1.2, 0.98
SHARES = {"50": 0.5, "10": 0.1, "1": 0.01, "0_1": 0.001, "0_001": 0.00001}
_AT_ONCE, _LOADED_CONNECTIONS = 1000, 8
_LINKED_WITHIN_S = 900.0
_DEPTH = 100


def live_texts(count: int, seed: int) -> list[str]:
    """So many texts of phrases, not those of the bundles."""
    return inventory(count, seed + 1).phrase_texts(np.arange(count)).to_pylist()


def filled(work: Path, bundle: Path, recipe: Recipe, count: int) -> Path:
    """A folder of so many live phrases with their vectors for the bundle, made where need be."""
    folder = work / f"{recipe.name}-live-{count}-v{SCHEMA_VERSION}"
    if folder.is_dir():
        with LiveStore.open(folder) as store:
            if sum(store.count().values()) == count:
                return folder
        shutil.rmtree(folder)
    say(f"encoding {count:,} live phrases with {recipe.name}")
    texts = live_texts(count, recipe.seed)
    with tempfile.TemporaryDirectory(prefix="bidmatch-live-", dir=work) as scratch:
        made = Path(scratch) / "live"
        flags = flags_for(serve_options(), live=made, workers=2, canary=0)
        with bidmatch("filling", bundle, Path(scratch), flags) as server:

            def fill(first: int) -> None:
                for start in range(first * _AT_ONCE, count, 2 * _AT_ONCE):
                    rows = range(start, min(start + _AT_ONCE, count))
                    phrases = [{"id": f"live {row}", "text": texts[row]} for row in rows]
                    status, answer, _ = call(server, "POST", "/phrases", {"phrases": phrases}, timeout=600)
                    if status != 200:
                        raise BidmatchError(f"POST /phrases: {status} {answer[:300]!r}")

            threads = [threading.Thread(target=fill, args=(first,)) for first in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        with LiveStore.open(made) as store:
            if sum(store.count().values()) != count:
                raise BidmatchError("some live phrases were not stored")
        made.rename(folder)
    return folder


def wait_until_linked(server: Server, count: int) -> float:
    """Seconds until all live phrases are in the graph.

    Raises:
        BidmatchError: that takes too long.
    """
    started = time.monotonic()
    while time.monotonic() < started + _LINKED_WITHIN_S:
        # A gauge is a second old at most, so it must have said how many there are, too.
        if metric(server, "bidmatch_live_phrases") == count and not metric(server, "bidmatch_live_unlinked"):
            return time.monotonic() - started
        time.sleep(1.1)
    raise BidmatchError("the live phrases do not get into the graph")


def latency(
    bundle: Path, live: Path, count: int, queries: Sequence[str], scratch: Path, rounds: int, seconds: float
) -> dict[str, Any]:
    """Latencies without and with live phrases, in turns, and their ratios round by round."""
    bodies = scratch / "bodies.jsonl"
    bodies.write_bytes(b"\n".join(orjson.dumps({"query": query, "k": K}) for query in queries))
    folders = {"none": scratch / f"{bundle.name}-none", "live": scratch / f"{bundle.name}-live"}
    shutil.copytree(live, folders["live"])
    rows: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = {}
        for name, folder in folders.items():
            flags = flags_for(serve_options(), live=folder, cache_mb=0, canary=0)
            servers[name] = stack.enter_context(bidmatch(f"{bundle.name}-{name}", bundle, scratch, flags))
            if name == "live":
                linked = wait_until_linked(servers[name], count)
                say(f"{bundle.name}: {count:,} live phrases were in the graph after {linked:.0f} s")
            servers[name].pause()
        asked = 0
        for number in range(rounds):
            for name in ("none", "live") if number % 2 else ("live", "none"):
                server = servers[name]
                server.resume()
                for what, connections in (("", 1), ("_loaded", _LOADED_CONNECTIONS)):
                    job = Job(server.host, server.port, bodies, seconds, connections, first=asked)
                    met = load(job)
                    if met.failed:
                        raise BidmatchError(f"{name}: {met.statuses}, {met.broken} broken")
                    asked += met.due
                    rows.setdefault(f"{name}{what}_p50_ms", []).append(met.p50_ms)
                    rows.setdefault(f"{name}{what}_p99_ms", []).append(met.p99_ms)
                server.pause()
            say(f"{bundle.name}: round {number + 1} of {rounds} done")
    for what in ("", "_loaded"):
        for at in ("p50", "p99"):
            rows[f"live{what}_{at}_ratio"] = ratios(rows[f"live{what}_{at}_ms"], rows[f"none{what}_{at}_ms"])
    found: dict[str, Any] = {"linked_s": linked}
    for name, values in rows.items():
        found[name], found[f"{name}_q1"], found[f"{name}_q3"] = spread(values)
    return found


def with_columns(work: Path, source: Path) -> Path:
    """The bundle with columns: markets, bids, match types, negative keywords."""
    path = work / f"{source.name}-columns"
    with open_bundle(source) as bundle:
        if (path / fmt.MANIFEST).is_file() and read_manifest(path).created == bundle.manifest.created:
            return path
        say(f"putting {path} together")
        rng = np.random.default_rng(3)
        words = sorted(
            {word for text in bundle.phrases["text"][:2000].to_pylist() for word in words_of(text)}
        )
        columns = [columns_of(rng, words) for _ in range(bundle.phrases.num_rows)]
        types = {
            "market": pa.string(),
            "bid": pa.float64(),
            "match_type": pa.string(),
            "negative_keywords": pa.list_(pa.string()),
        }
        phrases = bundle.phrases
        for name, kind in types.items():
            phrases = phrases.append_column(name, pa.array([one.get(name) for one in columns], kind))
        ours = {"format_version", "bundle_id", "files", "checksum"}
        fields = {name: value for name, value in bundle.manifest if name not in ours}
        with atomic_dir(path, overwrite=path.exists()) as folder:
            write_phrases(folder, phrases)
            for name in bundle.manifest.files:
                if not (folder / name).exists():
                    shutil.copyfile(source / name, folder / name)
            finish(folder, fields)
    return path


def filters(bundle: Path, queries: Sequence[str], count: int) -> dict[str, Any]:
    """Recall@100 of filtered search, by selectivity: rows at random, and those farthest from the query."""
    opened = open_bundle(bundle)
    vectors = np.asarray(opened.vectors)
    plain = Engine(opened, Engine.load(bundle).settings)
    encoded = plain.encoder.encode(list(queries[: 20 * count])).narrow
    near = np.argsort(-(encoded @ encoded[0]), kind="stable")[:count]
    asked = {"filter_recall": list(range(count)), "far_filter_recall": near.tolist()}
    ranks = {
        "filter_recall": np.random.default_rng(0).permutation(len(vectors)),
        "far_filter_recall": np.argsort(np.argsort(vectors @ encoded[0])),
    }
    found: dict[str, Any] = {}
    for name, places in asked.items():
        phrases = opened.phrases.append_column("rank", pa.array(ranks[name], pa.int64()))
        engine = Engine(dataclasses.replace(opened, phrases=phrases), plain.settings)
        engine.scopes.columns.prepare(["rank"])
        some = engine.encode([queries[place] for place in places])
        # A quantised encoder's vectors depend on the batch, so those that are searched with are compared.
        asked_for = some.vectors.narrow
        for label, share in SHARES.items():
            least = max(1, round(share * len(vectors)))
            options = MatchOptions(_DEPTH, None, parse_filter({"rank": {"lt": least}}, engine.phrase_columns))
            started = time.perf_counter()
            met = engine.find(some, options)
            took = time.perf_counter() - started
            rows = np.flatnonzero(ranks[name] < least)
            hits = wanted = 0
            for at, vector in enumerate(asked_for):
                scores = vectors[rows] @ vector
                depth = min(_DEPTH, len(rows))
                last = np.partition(scores, len(scores) - depth)[len(scores) - depth] - 1e-5
                mine = met.rows[met.offsets[at] : met.offsets[at + 1]]
                if not np.isin(mine, rows).all() or len(mine) < depth:
                    raise BidmatchError(f"{name}, {label}%: too few matches, or others than are allowed")
                hits += min(depth, int((vectors[mine] @ vector >= last).sum()))
                wanted += depth
            found[f"{name}_{label}"] = hits / wanted
            found[f"{name}_{label}_ms"] = 1e3 * took / count
    for name in asked:
        found[name] = min(found[f"{name}_{label}"] for label in SHARES)
    return found


def missed(result: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    wrong = []
    for name in ("live_ratio", "bag_live_ratio"):
        if result.get(name, 0.0) >= RATIO_LIMIT:
            wrong.append(f"{name} is {result[name]:.3f}, not below {RATIO_LIMIT}")
    for name in ("recall_10", "filter_recall", "far_filter_recall"):
        if result.get(name, 1.0) < RECALL_LIMIT:
            wrong.append(f"{name} is {result[name]:.4f}, below {RECALL_LIMIT}")
    for name in ("errors", "lost_phrases", "ghost_phrases", "phrases_twice", "wrong_answers", "wrong_states"):
        if result.get(name):
            wrong.append(f"{result[name]} {name.replace('_', ' ')}")
    if result.get("broken_clients"):
        wrong.append(f"{result['broken_clients']} broken clients")
    return wrong


def show(result: dict[str, Any]) -> None:
    """The figures for people."""
    of = SimpleNamespace(**result)
    for prefix, encoder in (("", "MiniLM-L6"), ("bag_", "bag")):
        if not of.rounds:
            break
        for load_of, who in (("", "1 connection"), ("_loaded", f"{_LOADED_CONNECTIONS} connections")):
            for at in ("p50", "p99"):
                before, after = (result[f"{prefix}{one}{load_of}_{at}_ms"] for one in ("none", "live"))
                ratio = f"{prefix}live{load_of}_{at}_ratio"
                quartiles = f"({result[f'{ratio}_q1']:.3f}, {result[f'{ratio}_q3']:.3f})"
                click.echo(
                    f"{encoder}, {who}, {at}: {before:.3f} ms without live phrases, {after:.3f} ms with "
                    f"{of.live_phrases:,}; ratio {result[ratio]:.3f} {quartiles}"
                )
    if of.seconds:
        click.echo(
            f"{of.clients} clients for {of.seconds:g} s: {of.done}\n"
            f"errors {of.errors}, lost {of.lost_phrases}, ghosts {of.ghost_phrases}, twice "
            f"{of.phrases_twice}, wrong answers {of.wrong_answers}, wrong states {of.wrong_states}\n"
            f"recall@10 {of.recall_10:.4f} (least {of.recall_least:.4f}), recall@100 {of.recall_100:.4f} of "
            f"{of.recall_queries} queries\n"
            f"a search {of.search_p50_ms:.1f} ms at the median, {of.search_p99_ms:.1f} ms at p99; a change "
            f"{of.change_p50_ms:.1f} and {of.change_p99_ms:.1f} ms"
        )
    for name, which in (("filter_recall", "at random"), ("far_filter_recall", "farthest from the query")):
        if of.filter_queries:
            figures = ", ".join(
                f"{label.replace('_', '.')}% {result[f'{name}_{label}']:.4f} "
                f"({result[f'{name}_{label}_ms']:.2f} ms)"
                for label in SHARES
            )
            click.echo(f"recall@{_DEPTH} under filters, rows {which}: {figures}")


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--bag-phrases", default=100_000, show_default=True, type=click.IntRange(1000))
@click.option("--live", default=100_000, show_default=True, type=click.IntRange(1), help="Live phrases.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(0), help="Of latency; 0: none.")
@click.option("--round-seconds", default=5.0, show_default=True, help="Of each load.")
@click.option("--seconds", default=300.0, show_default=True, help="Of all clients at once; 0: none.")
@click.option("--clients", default=32, show_default=True, type=click.IntRange(1))
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1), help="That the clients ask.")
@click.option(
    "--filter-queries", default=200, show_default=True, type=click.IntRange(0), help="Of filters; 0: none."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(
    work: Path,
    phrases: int,
    bag_phrases: int,
    live: int,
    rounds: int,
    round_seconds: float,
    seconds: float,
    clients: int,
    workers: int,
    filter_queries: int,
    as_json: bool,
) -> None:
    """Live phrases and filters of the service."""
    raise_file_limit()
    end_in_order()
    work.mkdir(parents=True, exist_ok=True)
    queries = queries_of(work, phrases)
    result: dict[str, Any] = {
        "phrases": phrases,
        "bag_phrases": bag_phrases,
        "live_phrases": live,
        "rounds": rounds,
        "seconds": seconds,
        "clients": clients,
        "workers": workers,
        "filter_queries": filter_queries,
    }
    with tempfile.TemporaryDirectory(prefix="bidmatch-live-") as folder:
        scratch = Path(folder)
        for prefix, recipe in (("", minilm(phrases)), ("bag_", bag(bag_phrases))):
            if rounds:
                bundle = bundle_of(work, recipe, queries)
                store = filled(work, bundle, recipe, live)
                found = latency(bundle, store, live, queries, scratch, rounds, round_seconds)
                result |= {f"{prefix}{name}": value for name, value in found.items()}
                result[f"{prefix}live_ratio"] = found["live_p50_ratio"]
        if seconds:
            bundle = with_columns(work, bundle_of(work, bag(bag_phrases), queries))
            texts = [*live_texts(5_000, 1), *queries[:500]]
            result |= crowd(
                bundle, texts, queries, scratch, clients=clients, seconds=seconds, workers=workers
            )
        if filter_queries:
            result |= filters(bundle_of(work, minilm(phrases), queries), queries, filter_queries)
    conclude(result, show, missed(result), as_json=as_json)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
