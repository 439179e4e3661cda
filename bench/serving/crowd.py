"""Clients at work together, looked at now and then: recall against exact search over what is active."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from prometheus_client.parser import text_string_to_metric_families

from bench.serving.advertisers import (
    OWN_OF_BUNDLE,
    Bid,
    Client,
    Crowd,
    Faults,
    Gate,
    filter_of,
    hits,
    meets,
    words_of,
)
from bench.serving.processes import Server, bidmatch, flags_for, serve_options
from bench.serving.watch import call
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError
from bidmatch.base.text import key
from service.engine import Engine
from service.live.sync import encode_phrases

LOOKS, LOOK_QUERIES, DEPTHS = 6, 60, (10, 100)
# The clients ask as fast as they can, on the processors that the server works on.
DEADLINE_MS = 5_000


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
    ) -> np.ndarray:
        """Of the best phrases, how many the server finds and how many there are.

        Args:
            server: what is asked.
            changed: the latest state of all phrases that may have been changed.
            queries: what is asked.
            faults: gets answers that have too few matches, or others than are allowed.

        Returns:
            int64 (2, 2), a row for each of `DEPTHS`.
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
        counts = np.zeros((len(DEPTHS), 2), np.int64)
        for query, vector in zip(queries, self.engine.encoder.encode(queries).narrow, strict=True):
            chosen = filter_of(rng) if rng.random() < 0.5 else {}
            parts = [one.kept(query, chosen) for one in (self._rules, rules)]
            kept, exact = (np.concatenate(both) for both in zip(*parts, strict=True))
            kept &= on
            scores = vectors @ vector
            rows = np.flatnonzero(kept)
            ordered = rows[np.lexsort((-scores[rows], ~exact[rows]))]
            for at, depth in enumerate(DEPTHS):
                body = {"query": query, "k": depth} | ({"filter": chosen} if chosen else {})
                status, content, _ = call(server, "POST", "/match", body)
                if status != 200:
                    faults.add("errors", f"POST /match: {status} {content[:300]!r}")
                    continue
                best = ordered[:depth]
                answered = [match["id"] for match in orjson.loads(content)["matches"]]
                places = [place.get(id, -1) for id in answered]
                for id, row in zip(answered, places, strict=True):
                    if row < 0 or not kept[row]:
                        faults.add("ghost phrases", f"{id} for {query!r} {chosen}")
                if len(answered) < len(best):
                    faults.add("lost phrases", f"{len(answered)} of {len(best)} for {query!r} {chosen}")
                # Of equal scores any will do.
                last = scores[best[-1]] - 1e-5 if len(best) else 0.0
                good = sum(row >= 0 and bool(exact[row] or scores[row] >= last) for row in places)
                counts[at] += min(len(best), good), len(best)
        return counts


def crowd(
    bundle: Path,
    texts: Sequence[str],
    queries: Sequence[str],
    scratch: Path,
    *,
    clients: int,
    seconds: float,
    workers: int,
    looks: int = LOOKS,
) -> dict[str, Any]:
    """Everything at once.

    Args:
        bundle: with the columns that `columns_of` makes.
        texts: what live phrases say, and clients ask.
        queries: what is asked for the recall.
        scratch: folder for what the server says and keeps.
        clients: how many.
        seconds: how long they work in all.
        workers: of the server.
        looks: how often they stand still to be looked at.
    """
    reference = Reference(bundle)
    faults, gate = Faults(), Gate(clients)
    settings = {"live": scratch / "crowd", "workers": workers, "canary": 0, "deadline_ms": DEADLINE_MS}
    flags = flags_for(serve_options(), **settings)
    counts: list[np.ndarray] = []
    with bidmatch("crowd", bundle, scratch, flags) as server:
        own = [reference.bids[n * OWN_OF_BUNDLE : (n + 1) * OWN_OF_BUNDLE] for n in range(clients)]
        everybody = Crowd(
            [Client(n, server, texts, own[n], faults, gate) for n in range(clients)], faults, gate
        )

        def look() -> None:
            if workers > 1:
                time.sleep(1.5)  # what one worker acknowledged is in the others within a second
            changed = [bid for client in everybody.clients for bid in client.bids.values()]
            start = len(counts) * LOOK_QUERIES
            counts.append(reference.compare(server, changed, queries[start : start + LOOK_QUERIES], faults))
            recalls = ", ".join(
                f"recall@{depth} {found / total:.4f}"
                for depth, (found, total) in zip(DEPTHS, counts[-1].tolist(), strict=True)
            )
            say(f"look {len(counts)} of {looks}: {recalls}, faults: {dict(faults.counts)}")

        everybody.run(seconds, looks, look)
        for client in everybody.clients:
            client.look_at_each()
        live = metric(server, "bidmatch_live_phrases")
    done = sum((client.done for client in everybody.clients), Counter())
    took = {
        kind: np.concatenate([client.seconds[kind] for client in everybody.clients]) * 1e3
        for kind in ("search", "change")
    }
    summed = np.sum(counts, axis=0)
    shares = (summed[:, 0] / summed[:, 1]).tolist()
    kinds = ("errors", "lost phrases", "ghost phrases", "phrases twice", "wrong answers", "wrong states")
    return {
        **{kind.replace(" ", "_"): faults.counts[kind] for kind in (*kinds, "broken clients")},
        **{f"recall_{depth}": shares[at] for at, depth in enumerate(DEPTHS)},
        "recall_least": min(found / total for (found, total), _ in counts),
        "recall_queries": LOOK_QUERIES * len(counts),
        "live_at_last": live,
        "done": dict(done),
        **{
            f"{kind}_{name}_ms": float(np.percentile(values, at))
            for kind, values in took.items()
            for name, at in (("p50", 50), ("p99", 99))
        },
    }
