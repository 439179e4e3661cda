"""What live phrases cost a match, whether any is lost or late, and what a filter finds.

    python -m bench.serving.live [--json] [--work runs/bench-serving] [--rounds 5] [--seconds 300]

1. Latency of /match with 100,000 live phrases beside that without any: two servers of the same settings
   (cache off, so that every request searches), in turns, the one that is not measured stopped. With MiniLM-L6
   over 1,000,000 phrases (`live_ratio`) and with the `bag` encoder over 100,000, where search is most of the
   work (`bag_live_ratio`): medians of single requests, and under load (`live_loaded_p50_ratio`).
2. For five minutes 32 clients (`bench.serving.advertisers`) add, change, pause, resume and remove phrases,
   search and filter at once: errors, lost and ghost phrases, answers that no rule allows, and recall@100
   against exact search over all phrases that are active, at six moments (`recall`).
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
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import orjson
import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from bench.serving.advertisers import (
    OWN_OF_BUNDLE,
    Bid,
    Client,
    Crowd,
    Faults,
    Gate,
    columns_of,
    filter_of,
    hits,
    meets,
    words_of,
)
from bench.serving.bundles import WORK, K, bundle_of, queries_of
from bench.serving.figures import ratios, spread
from bench.serving.load import Job, load, raise_file_limit
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import Recipe, bag, minilm
from bench.serving.watch import call
from bidmatch.base.console import emit_json, say
from bidmatch.base.errors import BidmatchError
from bidmatch.base.files import atomic_dir
from bidmatch.base.text import key
from bidmatch.demo.inventory import inventory
from export.bundle import format as fmt
from export.bundle.read import open_bundle, read_manifest
from export.bundle.write import finish, write_phrases
from service.engine import Engine
from service.live.store import LiveStore
from service.live.sync import encode_phrases
from service.options import MatchOptions
from service.rules.filters import parse_filter

RATIO_LIMIT, RECALL_LIMIT = 1.2, 0.98
SHARES = {"50": 0.5, "10": 0.1, "1": 0.01, "0_1": 0.001, "0_001": 0.00001}
_AT_ONCE, _LOADED_CONNECTIONS = 1000, 8
_LOOKS, _LOOK_QUERIES, _DEPTH = 6, 60, 100
_LINKED_WITHIN_S = 900.0


def live_texts(count: int, seed: int) -> list[str]:
    """So many texts of phrases, not those of the bundles."""
    return inventory(count, seed + 1).phrase_texts(np.arange(count)).to_pylist()


def filled(work: Path, bundle: Path, recipe: Recipe, count: int) -> Path:
    """A folder of so many live phrases with their vectors for the bundle, made where need be."""
    folder = work / f"{recipe.name}-live-{count}"
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


def metric(server: Server, name: str) -> float:
    """The sum of a metric's series."""
    status, text, _ = call(server, "GET", "/metrics")
    if status != 200:
        raise BidmatchError(f"GET /metrics: {status}")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    )


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


class Rules:
    """Which of n phrases a query may get, by a look at each of them.

    Args:
        bids: the phrases.
    """

    def __init__(self, bids: Sequence[Bid]):
        self._bids = bids
        self._keys = [key(bid.text) for bid in bids]
        kinds = [bid.columns.get("match_type") or "broad" for bid in bids]
        self._broad = np.array([kind == "broad" for kind in kinds], bool)
        self._runs = [
            (at, f" {' '.join(words_of(bid.text))} ")
            for at, (bid, kind) in enumerate(zip(bids, kinds, strict=True))
            if kind == "phrase"
        ]
        self._negative: dict[str, list[int]] = {}
        for at, bid in enumerate(bids):
            for keyword in bid.columns.get("negative_keywords") or []:
                self._negative.setdefault(keyword, []).append(at)
        self._filtered: dict[bytes, np.ndarray] = {}

    def kept(self, query: str, chosen: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Whether each phrase may be returned, and whether it equals the query: bool (n,) each."""
        asked = key(query)
        run = f" {' '.join(words_of(query))} "
        exact = np.fromiter((one == asked for one in self._keys), bool, len(self._keys))
        kept = self._broad | exact
        kept[[at for at, one in self._runs if one in run]] = True
        for keyword, rows in self._negative.items():
            if hits(keyword, words_of(query)):
                kept[rows] = False
        name = orjson.dumps(chosen)
        if name not in self._filtered:
            self._filtered[name] = np.array([meets(chosen, bid.columns) for bid in self._bids], bool)
        return kept & self._filtered[name], exact


class Reference:
    """Exact search over the bundle's phrases and live ones, with the rules applied to each of them.

    Args:
        bundle: the bundle that is served.
    """

    def __init__(self, bundle: Path):
        self.engine = Engine.load(bundle)
        self.bids = [
            Bid(
                row.pop("id"),
                row.pop("text"),
                {name: value for name, value in row.items() if value is not None},
                "active",
                False,
            )
            for row in self.engine.table.to_pylist()
        ]
        self._place = {bid.id: at for at, bid in enumerate(self.bids)}
        self._rules = Rules(self.bids)
        self._live = self.engine.new_live()
        self._vectors: dict[str, np.ndarray] = {}

    def _of_texts(self, texts: Sequence[str]) -> np.ndarray:
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        made = self._live.scored(encode_phrases(self.engine, new))
        self._vectors |= dict(zip(new, made, strict=True))
        dim = self.engine.bundle.manifest.dim
        return np.array([self._vectors[text] for text in texts], np.float32).reshape(-1, dim)

    def compare(
        self, server: Server, changed: Sequence[Bid], queries: Sequence[str], faults: Faults
    ) -> tuple[int, int]:
        """How many of the best phrases the server finds, and how many there are.

        Args:
            server: what is asked.
            changed: the latest state of all phrases that may have been changed.
            queries: what is asked.
            faults: gets answers that have too few matches, or others than are allowed.
        """
        on = np.ones(len(self.bids), bool)
        for bid in changed:
            if bid.id in self._place:
                on[self._place[bid.id]] = not bid.ours and bid.state == "active"
        live = [bid for bid in changed if bid.ours and bid.state == "active"]
        on = np.concatenate([on, np.ones(len(live), bool)])
        ids = [bid.id for bid in [*self.bids, *live]]
        place = {id: at for at, id in enumerate(ids) if on[at]}
        texts = self._of_texts([bid.text for bid in live])
        vectors = np.concatenate([np.asarray(self.engine.bundle.vectors), texts])
        rules, rng = Rules(live), np.random.default_rng(len(live))
        found = total = 0
        for query, vector in zip(queries, self.engine.encoder.encode(queries).narrow, strict=True):
            body: dict[str, Any] = {"query": query, "k": _DEPTH}
            if rng.random() < 0.5:
                body["filter"] = filter_of(rng)
            status, content, _ = call(server, "POST", "/match", body)
            if status != 200:
                faults.add("errors", f"POST /match: {status} {content[:300]!r}")
                continue
            parts = [one.kept(query, body.get("filter", {})) for one in (self._rules, rules)]
            kept, exact = (np.concatenate(both) for both in zip(*parts, strict=True))
            scores = vectors @ vector
            rows = np.flatnonzero(kept & on)
            best = rows[np.lexsort((-scores[rows], ~exact[rows]))][:_DEPTH]
            answered = [match["id"] for match in orjson.loads(content)["matches"]]
            places = [place.get(id, -1) for id in answered]
            for id, at in zip(answered, places, strict=True):
                if at < 0 or not kept[at]:
                    faults.add("ghost phrases", f"{id} for {query!r} {body.get('filter')}")
            if len(answered) < len(best):
                faults.add(
                    "lost phrases", f"{len(answered)} of {len(best)} for {query!r} {body.get('filter')}"
                )
            # Of equal scores any will do.
            last = scores[best[-1]] - 1e-5 if len(best) else 0.0
            good = sum(at >= 0 and bool(exact[at] or scores[at] >= last) for at in places)
            found, total = found + min(len(best), good), total + len(best)
        return found, total


def crowd(
    bundle: Path, queries: Sequence[str], scratch: Path, *, clients: int, seconds: float, workers: int
) -> dict[str, Any]:
    """Everything at once."""
    reference = Reference(bundle)
    faults, gate = Faults(), Gate()
    texts = [*live_texts(5_000, 1), *queries[:500]]
    flags = flags_for(serve_options(), live=scratch / "crowd", workers=workers, canary=0)
    recalls: list[tuple[int, int]] = []
    with bidmatch("crowd", bundle, scratch, flags) as server:
        own = [reference.bids[n * OWN_OF_BUNDLE : (n + 1) * OWN_OF_BUNDLE] for n in range(clients)]
        everybody = Crowd(
            [Client(n, server, texts, own[n], faults, gate) for n in range(clients)], faults, gate
        )

        def look() -> None:
            if workers > 1:
                time.sleep(1.5)  # what one worker acknowledged is in the others within a second
            changed = [bid for client in everybody.clients for bid in client.bids.values()]
            start = len(recalls) * _LOOK_QUERIES
            met = reference.compare(server, changed, queries[start : start + _LOOK_QUERIES], faults)
            recalls.append(met)
            say(
                f"look {len(recalls)} of {_LOOKS}: recall@{_DEPTH} {met[0] / met[1]:.4f}, "
                f"faults: {dict(faults.counts)}"
            )

        everybody.run(seconds, _LOOKS, look)
        for client in everybody.clients:
            client.look_at_each()
        live = metric(server, "bidmatch_live_phrases")
    done = sum((client.done for client in everybody.clients), Counter())
    took = {
        kind: np.concatenate([client.seconds[kind] for client in everybody.clients]) * 1e3
        for kind in ("search", "change")
    }
    kinds = ("errors", "lost phrases", "ghost phrases", "phrases twice", "wrong answers", "wrong states")
    return {
        **{kind.replace(" ", "_"): faults.counts[kind] for kind in (*kinds, "broken clients")},
        "recall": sum(hit for hit, _ in recalls) / sum(of for _, of in recalls),
        "recall_least": min(hit / of for hit, of in recalls),
        "recall_queries": _LOOK_QUERIES * len(recalls),
        "live_at_last": live,
        "done": dict(done),
        **{
            f"{kind}_{name}_ms": float(np.percentile(values, at))
            for kind, values in took.items()
            for name, at in (("p50", 50), ("p99", 99))
        },
    }


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
    for name in ("recall", "filter_recall", "far_filter_recall"):
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
            f"recall@{_DEPTH} {of.recall:.4f} (least {of.recall_least:.4f}, {of.recall_queries} queries); a "
            f"search {of.search_p50_ms:.1f} ms at the median, {of.search_p99_ms:.1f} ms at p99; a change "
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
            result |= crowd(bundle, queries, scratch, clients=clients, seconds=seconds, workers=workers)
        if filter_queries:
            result |= filters(bundle_of(work, minilm(phrases), queries), queries, filter_queries)
    if as_json:
        emit_json(result)
    else:
        show(result)
    wrong = missed(result)
    for fault in wrong:
        say(f"MISSED: {fault}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
