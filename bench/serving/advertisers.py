"""Clients that change phrases, search and filter at once, and know at every moment what they must find.

Each has phrases of its own: live ones, and some of the bundle's. No other client changes these, so what is
acknowledged to it is what a search within its own phrases must show on the same connection from then on: not
one less (a lost phrase), not one more (a ghost), each in its latest state. Beside that everybody searches
among all phrases, and what comes back must obey the request.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from bench.serving.processes import Server
from bidmatch.base.console import say
from bidmatch.base.text import key, normalise

OWN, OWN_OF_BUNDLE = 150, 60
MARKETS = ("us", "de", "fr", "jp")
_SHOWN = 5
_EVERY = 1000


@dataclass(frozen=True)
class Bid:
    """A phrase as a client left it.

    Attributes:
        id: its id.
        text: what it says.
        columns: its columns.
        state: `active`, `paused`, `removed`, or `none` before it was added.
        ours: whether it is a live one; else the bundle's.
    """

    id: str
    text: str
    columns: Mapping[str, Any]
    state: str
    ours: bool


def words_of(text: str) -> list[str]:
    """The words that match types and negative keywords look at."""
    return re.findall(r"\w+", key(text))


def hits(keyword: str, query: Sequence[str]) -> bool:
    """Whether a negative keyword hits a query of these words."""
    spoken, written = words_of(keyword), key(keyword)
    if not spoken:
        return False
    if len(written) > 1 and written.startswith('"') and written.endswith('"'):
        return f" {' '.join(spoken)} " in f" {' '.join(query)} "
    if written.startswith("[") and written.endswith("]"):
        return spoken == list(query)
    return set(spoken) <= set(query)


def bought(query: str, text: str, columns: Mapping[str, Any]) -> bool:
    """Whether a phrase was bought for a query: its match type lets it, and no negative keyword hits."""
    asked, spoken = words_of(query), words_of(text)
    if any(hits(keyword, asked) for keyword in columns.get("negative_keywords") or []):
        return False
    kind = columns.get("match_type") or "broad"
    if kind == "broad" or key(query) == key(text):
        return True
    return kind == "phrase" and bool(spoken) and f" {' '.join(spoken)} " in f" {' '.join(asked)} "


def meets(chosen: Mapping[str, Any], columns: Mapping[str, Any]) -> bool:
    """Whether a phrase's columns meet a filter of equalities, lists and lower bounds."""
    for name, wanted in chosen.items():
        value = columns.get(name)
        if isinstance(wanted, dict):
            if value is None or value < wanted["gte"]:
                return False
        elif value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def columns_of(rng: np.random.Generator, words: Sequence[str]) -> dict[str, Any]:
    """Columns such as advertisers have, at random."""
    kind = str(rng.choice(["broad", "broad", "phrase", "exact"]))
    columns: dict[str, Any] = {"market": str(rng.choice(MARKETS)), "match_type": kind}
    columns["bid"] = round(float(rng.uniform(0.05, 3)), 2)
    if rng.random() < 0.2:
        word = str(rng.choice(words))
        columns["negative_keywords"] = [[word], [f'"{word}"'], [f"[{word}]"]][rng.integers(3)]
    return columns


def filter_of(rng: np.random.Generator) -> dict[str, Any]:
    """A filter at random."""
    some: list[dict[str, Any]] = [
        {"market": "de"},
        {"market": ["us", "jp"], "bid": {"gte": 1.0}},
        {"bid": {"gte": 2.5}},
        {"match_type": ["broad", "phrase"]},
    ]
    return some[rng.integers(len(some))]


@dataclass
class Faults:
    """What went wrong, counted; the first few of each kind are said."""

    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, what: str) -> None:
        """Count one."""
        with self._lock:
            self.counts[kind] += 1
            if self.counts[kind] <= _SHOWN:
                say(f"{kind}: {what[:500]}")


class Gate:
    """Where clients wait while they are looked at.

    Args:
        clients: how many there are.
    """

    def __init__(self, clients: int) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._clients, self._waiting = clients, 0

    def go_through(self) -> None:
        """Wait until it is open."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open)
            self._waiting -= 1

    def leave(self) -> None:
        """One client never comes again."""
        with self._changed:
            self._clients -= 1
            self._changed.notify_all()

    def close_and_wait(self, timeout: float) -> bool:
        """Close it; whether all came before the timeout, in seconds."""
        with self._changed:
            self._open = False
            return self._changed.wait_for(lambda: self._waiting >= self._clients, timeout)

    def open(self) -> None:
        """Let all go on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


class Connection:
    """One kept-alive connection, so one worker of the server."""

    def __init__(self, server: Server):
        self._server = server
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status (0: no answer came) and JSON."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(
                    self._server.host, self._server.port, timeout=30
                )
            content = None if body is None else orjson.dumps(body)
            self._connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            return answer.status, orjson.loads(answer.read())
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as failure:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            return 0, str(failure)


class Client:
    """One of the clients; `run` it on a thread.

    Args:
        number: of the client.
        server: what it asks.
        texts: what phrases say, and queries are made of.
        bundle: the phrases of the bundle that are its own.
        faults: where what goes wrong is counted.
        gate: it goes through it before every request.

    Attributes:
        bids: its phrases by id.
        done: how often it did what.
        seconds: how long each kind of request took.
    """

    def __init__(
        self,
        number: int,
        server: Server,
        texts: Sequence[str],
        bundle: Sequence[Bid],
        faults: Faults,
        gate: Gate,
    ):
        self._rng = np.random.default_rng([7, number])
        self._connection = Connection(server)
        self._texts, self._faults, self._gate = texts, faults, gate
        self._words = sorted({word for text in texts[:2000] for word in words_of(text)})
        own = [Bid(f"live {number}/{at}", "", {}, "none", True) for at in range(OWN)]
        self.bids = {bid.id: bid for bid in [*own, *bundle]}
        self._ids = list(self.bids)
        self.done: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"search": [], "change": []}

    def run(self, over: threading.Event) -> None:
        """Change and search until it is over."""
        try:
            while not over.is_set():
                self._gate.go_through()
                draw = self._rng.random()
                if draw < 0.2:
                    self._put()
                elif draw < 0.4:
                    self._set_state()
                elif draw < 0.7:
                    self.check()
                else:
                    self._search()
        except BaseException as failure:
            self._faults.add("broken clients", repr(failure))
            raise
        finally:
            self._gate.leave()

    def _call(self, kind: str, method: str, path: str, body: Any = None) -> Any:
        started = time.monotonic()
        status, answer = self._connection.ask(method, path, body)
        self.seconds[kind].append(time.monotonic() - started)
        if status != 200:
            self._faults.add("errors", f"{method} {path}: {status} {answer}")
            return None
        return answer

    def _some_ids(self, most: int) -> list[str]:
        return self._rng.choice(self._ids, self._rng.integers(1, most + 1), replace=False).tolist()

    def _text(self) -> str:
        return self._texts[int(self._rng.integers(len(self._texts)))]

    def _put(self) -> None:
        phrases: list[dict[str, Any]] = [
            {"id": id, "text": self._text(), "columns": columns_of(self._rng, self._words)}
            for id in self._some_ids(4)
        ]
        answer = self._call("change", "POST", "/phrases", {"phrases": phrases})
        self.done["phrases put"] += len(phrases)
        if answer is None:
            return
        for sent, told in zip(phrases, answer["phrases"], strict=True):
            before = self.bids[sent["id"]]
            state = "paused" if before.state == "paused" else "active"
            self.bids[before.id] = Bid(before.id, normalise(sent["text"]), sent["columns"], state, True)
            self._same(told, self.bids[before.id])

    def _set_state(self) -> None:
        id = self._some_ids(1)[0]
        bid = self.bids[id]
        if bid.state in ("none", "removed"):
            return
        actions = ["pause", "resume", "resume"] + (["remove"] if bid.ours else [])
        action = str(self._rng.choice(actions))
        method, path = ("DELETE", "") if action == "remove" else ("POST", f"/{action}")
        answer = self._call("change", method, f"/phrases/{quote(id, safe='')}{path}")
        self.done[f"phrases {action}d"] += 1
        if answer is not None:
            state = {"pause": "paused", "resume": "active", "remove": "removed"}[action]
            self.bids[id] = replace(bid, state=state)
            self._same(answer, self.bids[id])

    def _same(self, told: dict[str, Any], bid: Bid) -> None:
        if (told["id"], told["text"], told["state"]) != (bid.id, bid.text, bid.state):
            self._faults.add("wrong states", f"{told}, not {bid}")

    def _query(self) -> str:
        draw = self._rng.random()
        if draw < 0.5:
            text = self.bids[self._some_ids(1)[0]].text or self._text()
            if draw < 0.2:
                return text
            more = " ".join(self._rng.choice(self._words, 2).tolist())
            return f"{more} {text}" if draw < 0.35 else f"{text} {more}"
        return self._text()

    def check(self) -> None:
        """Search among its own phrases: all that are active and nothing else must come."""
        query = self._query()
        body: dict[str, Any] = {"query": query, "k": _EVERY, "allow": self._ids}
        if self._rng.random() < 0.5:
            body["filter"] = filter_of(self._rng)
        answer = self._call("search", "POST", "/match", body)
        self.done["searches of their own"] += 1
        if answer is None:
            return
        wanted = {
            bid.id: bid
            for bid in self.bids.values()
            if bid.state == "active"
            and meets(body.get("filter", {}), bid.columns)
            and bought(query, bid.text, bid.columns)
        }
        found = {match["id"]: match for match in answer["matches"]}
        if len(found) != len(answer["matches"]):
            self._faults.add("phrases twice", f"{query!r}")
        for id in wanted.keys() - found.keys():
            self._faults.add("lost phrases", f"{self.bids[id]} for {query!r} {body.get('filter')}")
        for id in found.keys() - wanted.keys():
            self._faults.add("ghost phrases", f"{found[id]} for {query!r} {body.get('filter')}")
        for id in found.keys() & wanted.keys():
            if found[id]["phrase"] != wanted[id].text:
                self._faults.add("ghost phrases", f"{found[id]}, not {wanted[id]}")

    def _search(self) -> None:
        """Search among all phrases."""
        query = self._query()
        body: dict[str, Any] = {"query": query, "k": int(self._rng.choice([10, 100]))}
        if self._rng.random() < 0.5:
            body["filter"] = filter_of(self._rng)
        answer = self._call("search", "POST", "/match", body)
        self.done["searches"] += 1
        if answer is None:
            return
        matches = answer["matches"]
        order = [(match["source"] != "exact", -match["score"]) for match in matches]
        if len({match["id"] for match in matches}) != len(matches):
            self._faults.add("phrases twice", f"{query!r}")
        if order != sorted(order) or len(matches) > body["k"]:
            self._faults.add("wrong answers", f"{query!r}: order or number")
        for match in matches:
            columns, bid = match.get("columns", {}), self.bids.get(match["id"])
            if not meets(body.get("filter", {}), columns) or not bought(query, match["phrase"], columns):
                self._faults.add("wrong answers", f"{query!r} {body.get('filter')}: {match}")
            if (match["source"] == "exact") != (key(match["phrase"]) == key(query)):
                self._faults.add("wrong answers", f"{query!r}: source of {match}")
            if bid is not None and (bid.state != "active" or bid.text != match["phrase"]):
                self._faults.add("ghost phrases", f"{match}, not {bid}")

    def look_at_each(self) -> None:
        """Ask for each of its phrases."""
        for bid in self.bids.values():
            if bid.state != "none":
                told = self._call("search", "GET", f"/phrases/{quote(bid.id, safe='')}")
                if told is not None:
                    self._same(told, bid)


@dataclass
class Crowd:
    """All clients at work, stopped now and then to be looked at.

    Attributes:
        clients: them.
        faults: what went wrong.
    """

    clients: list[Client]
    faults: Faults
    gate: Gate

    def run(self, seconds: float, looks: int, look: Callable[[], None]) -> None:
        """Let them work for so long in all, and `look` so often while they stand still."""
        over = threading.Event()
        threads = [threading.Thread(target=one.run, args=(over,), daemon=True) for one in self.clients]
        for thread in threads:
            thread.start()
        try:
            for _ in range(looks):
                over.wait(seconds / looks)
                if not self.gate.close_and_wait(60):
                    self.faults.add("errors", "a client does not come to an end")
                look()
                self.gate.open()
        finally:
            over.set()
            self.gate.open()
            for thread in threads:
                thread.join(60)
