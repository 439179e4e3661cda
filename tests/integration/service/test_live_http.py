"""Live phrases of a running service: caches, workers, restarts, kills."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.service.ads import Ad, Asked, make_ads, make_queries, meanwhile, write_bundle
from tests.integration.service.conftest import Server

EVERY = 1000


@pytest.fixture(scope="module")
def ads() -> list[Ad]:
    return make_ads(500, seed=1, broad=0.5)


@pytest.fixture(scope="module")
def bundle(ads: list[Ad], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("http") / "bundle", ads)


@contextmanager
def served(bundle: Path, live: Path, *arguments: str) -> Iterator[Server]:
    server = Server("--bundle", str(bundle), "--live", str(live), "--canary", "0", *arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


class Connection:
    """One kept-alive connection, so one worker."""

    def __init__(self, server: Server):
        self._connection = http.client.HTTPConnection(*server.address, timeout=20)
        self._connection.connect()

    @property
    def port(self) -> int:
        """Ours."""
        assert self._connection.sock is not None
        port: int = self._connection.sock.getsockname()[1]
        return port

    def send(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON; the status has to be 200."""
        content = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        read = answer.read()
        assert answer.status == 200, (method, path, answer.status, read)
        return json.loads(read) if answer.headers["content-type"] == "application/json" else read.decode()

    def put(self, *phrases: dict[str, Any]) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self.send("POST", "/phrases", {"phrases": phrases})["phrases"]
        return states

    def match(self, query: str, **asked: Any) -> list[dict[str, Any]]:
        matches: list[dict[str, Any]] = self.send("POST", "/match", {"query": query, **asked})["matches"]
        return matches

    def ids(self, query: str, **asked: Any) -> list[str]:
        return [match["id"] for match in self.match(query, **asked)]

    def active(self, ids: list[str]) -> set[str]:
        """Which of these phrases can be matched."""
        found: set[str] = set()
        for start in range(0, len(ids), EVERY):
            part = ids[start : start + EVERY]
            found |= set(self.ids("red shoes", k=EVERY, allow=part))
        return found

    def close(self) -> None:
        self._connection.close()


def metric(text: str, name: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def test_answers_from_the_cache_are_those_without_it(bundle: Path, ads: list[Ad], tmp_path: Path) -> None:
    """After every change of a long random sequence, of phrases of the bundle and live ones."""
    rng = np.random.default_rng(0)
    chance = random.Random(0)
    queries = make_queries(ads, 40, 2)
    new = make_ads(200, seed=3, broad=0.5)
    live = [f"n{at}" for at in range(30)]
    mine = [ad.id for ad in ads]
    asked = [
        Asked(k=1),
        Asked(k=5),
        Asked(k=5, distinct=True),
        Asked(k=10, min_score=1.0),
        Asked(k=10, filter={"market": "us"}),
        Asked(k=10, filter={"bid": {"gte": 1.0}}, deny=tuple(live[:5])),
        Asked(k=20, allow=tuple(live + mine[:100])),
    ]
    removed: set[str] = set()

    def change(connections: list[Connection]) -> None:
        id = chance.choice(live) if chance.random() < 0.7 else chance.choice(mine)
        action = chance.choice(["put", "put", "equal", "pause", "resume", "remove"])
        if action in ("put", "equal"):
            ad = chance.choice(new)
            # Now and then the very text of a query that is cached.
            text = chance.choice(queries) if action == "equal" else ad.text
            known = {name: value for name, value in ad.columns.items() if value is not None}
            told = [one.put({"id": id, "text": text, "columns": known}) for one in connections]
            removed.discard(id)
        elif id in removed or (id in live and id not in put):
            return
        else:
            method, path = ("DELETE", "") if action == "remove" else ("POST", f"/{action}")
            told = [one.send(method, f"/phrases/{id}{path}") for one in connections]
            if action == "remove":
                removed.add(id)
        put.add(id)
        for one in told:
            for state in one if isinstance(one, list) else [one]:
                state.pop("changed")
        assert told[0] == told[1]

    put: set[str] = set()
    flags = ("--ef", "100000")
    with (
        served(bundle, tmp_path / "cached", *flags) as cached,
        served(bundle, tmp_path / "plain", "--cache-mb", "0", *flags) as plain,
    ):
        connections = [Connection(cached), Connection(plain)]
        for step in range(250):
            change(connections)
            for _ in range(8):
                query = queries[min(int(rng.zipf(1.3)), len(queries)) - 1]
                body = {"query": query, **chance.choice(asked).body()}
                one, other = (
                    connection.send("POST", "/match", body)["matches"] for connection in connections
                )
                assert one == other, (step, body)
        text = connections[0].send("GET", "/metrics")
        hits, dropped = (
            metric(text, "bidmatch_cache_hits_total"),
            metric(text, "bidmatch_cache_invalidated_total"),
        )
        assert hits > 200, "hardly anything came from the cache"
        assert dropped > 50, "no change dropped anything"
        assert metric(connections[1].send("GET", "/metrics"), "bidmatch_cache_hits_total") == 0


def workers_of(server: Server) -> list[int]:
    """Processes that the parent has started, and that listen."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == server.process.pid and stat[0] != "Z":
                found.append(int(entry.name))
    return found


def owner(server: Server, connection: Connection) -> int | None:
    """The process that accepted a connection."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    ends = f":{server.address[1]:04X}", f":{connection.port:04X}"
    inodes = {
        f"socket:[{fields[9]}]"
        for fields in map(str.split, lines)
        if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1])
    }
    for pid in workers_of(server):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()) in inodes:
                    return pid
    return None


def one_to_each(server: Server, workers: int) -> list[Connection]:
    """A connection to each worker."""
    found: dict[int, Connection] = {}
    spare = []
    until = time.monotonic() + 30
    while len(found) < workers and time.monotonic() < until:
        connection = Connection(server)
        connection.send("GET", "/healthz")
        pid = owner(server, connection)
        if pid is None or pid in found:
            spare.append(connection)
        else:
            found[pid] = connection
    for connection in spare:
        connection.close()
    assert len(found) == workers, "a worker accepts nothing"
    return list(found.values())


def seconds_until(condition: Callable[[], bool]) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + 30, "a change does not become visible"
        time.sleep(0.005)
    return time.monotonic() - started


def test_a_change_that_one_worker_acknowledges_all_see(bundle: Path, ads: list[Ad], tmp_path: Path) -> None:
    broad = [ad.id for ad in ads if ad.columns["match_type"] == "broad" and not ad.negatives]
    waits = []

    def seen(connections: list[Connection], ids: list[str], active: set[str]) -> None:
        waits.append(seconds_until(lambda: all(one.active(ids) == active for one in connections)))

    with served(bundle, tmp_path / "live", "--workers", "3") as server:
        first, *others = one_to_each(server, 3)
        for turn in range(6):
            id, ours = f"n{turn}", broad[turn]
            both = [id, ours]
            (state,) = first.put({"id": id, "text": f"tent {turn}"})
            assert (state["state"], state["source"]) == ("active", "live")
            # The worker that acknowledges has it already.
            assert first.active(both) == {id, ours}
            seen(others, both, {id, ours})
            first.send("POST", f"/phrases/{id}/pause")
            assert first.active(both) == {ours}
            seen(others, both, {ours})
            others[0].send("POST", f"/phrases/{id}/resume")
            others[0].send("POST", f"/phrases/{ours}/pause")
            assert others[0].active(both) == {id}
            seen([first, *others], both, {id})
            others[1].send("DELETE", f"/phrases/{id}")
            assert others[1].active(both) == set()
            seen([first, *others], both, set())
            # What one worker stored every other one knows at once.
            first.send("POST", f"/phrases/{ours}/resume")
            assert others[1].send("GET", f"/phrases/{ours}")["state"] == "active"
            seen(others, both, {ours})
    # Within a second, also where this machine is busy now and then.
    assert statistics.median(waits) < 1


def test_a_restart_keeps_everything(bundle: Path, ads: list[Ad], tmp_path: Path) -> None:
    columns = {"market": "us", "bid": 1.5, "negative_keywords": ["[used tent]"], "match_type": "broad"}
    new = [{"id": f"näw/{at}", "text": f"tent {at}", "columns": columns} for at in range(40)]
    kept: dict[str, Any] = {}
    ids = [str(one["id"]) for one in new] + [ad.id for ad in ads[:20]]
    answers = []
    for turn in range(3):
        with served(bundle, tmp_path / "live") as server:
            connection = Connection(server)
            if turn == 0:
                connection.put(*new)
                connection.put({"id": ads[7].id, "text": "instead of it", "columns": {}})
                for start, action in ((0, "pause"), (3, "resume")):
                    for id in ids[start::5]:
                        connection.send("POST", f"/phrases/{quoted(id)}/{action}")
                for id in ids[1::6]:
                    connection.send("DELETE", f"/phrases/{quoted(id)}")
                kept = {id: connection.send("GET", f"/phrases/{quoted(id)}") for id in ids}
                assert {one["state"] for one in kept.values()} == {"active", "paused", "removed"}
            assert {id: connection.send("GET", f"/phrases/{quoted(id)}") for id in ids} == kept
            answers.append(
                [connection.match(query, k=100) for query in ("tent 7", "used tent", "instead of it")]
            )
            assert server.stop() == 0
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][2][0]["id"] == ads[7].id


def quoted(id: str) -> str:
    return "".join(f"%{byte:02X}" for byte in id.encode())


def test_what_was_acknowledged_survives_kills(bundle: Path, tmp_path: Path) -> None:
    """Of a worker and of the parent in turn, ten times, while phrases are added."""
    acknowledged: list[str] = []
    sent: set[str] = set()
    lock = threading.Lock()
    running: list[Server] = []
    connections: dict[int, Connection] = {}
    numbers = iter(range(1_000_000))

    def add() -> None:
        me = threading.get_ident()
        with lock:
            ids = [f"k{next(numbers)}" for _ in range(random.randrange(1, 6))]
            sent.update(ids)
        try:
            if me not in connections:
                connections[me] = Connection(running[-1])
            connections[me].put(*({"id": id, "text": f"red shoes {id}"} for id in ids))
        except (OSError, http.client.HTTPException):
            connections.pop(me, None)
            time.sleep(0.05)
            return
        with lock:
            acknowledged.extend(ids)

    def all_there(server: Server) -> None:
        with lock:
            wanted = list(acknowledged)
        connection = Connection(server)
        seconds_until(lambda: connection.active(wanted) == set(wanted))
        connection.close()

    chance = random.Random(0)
    live = tmp_path / "live"
    flags = ("--bundle", str(bundle), "--live", str(live), "--workers", "2", "--canary", "0")
    running.append(Server(*flags))
    try:
        with meanwhile(add, add, add):
            for kill in range(10):
                time.sleep(chance.uniform(0.1, 0.4))
                server = running[-1]
                if kill % 2 == 0:
                    os.kill(chance.choice(workers_of(server)), signal.SIGKILL)
                    all_there(server)
                else:
                    server.process.kill()
                    server.process.wait()
                    running.append(Server(*flags))
                    all_there(running[-1])
        all_there(running[-1])
        connection = Connection(running[-1])
        # And no other phrase than was ever sent.
        found = {id for id in connection.ids("red shoes", k=EVERY) if id.startswith("k")}
        assert found <= sent
        assert len(acknowledged) > 100
        connection.close()
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()


def test_a_store_that_is_damaged_while_it_is_open(bundle: Path, tmp_path: Path) -> None:
    with served(bundle, tmp_path / "live") as server:
        connection = Connection(server)
        connection.put({"id": "n1", "text": "red tent"})
        before = connection.match("red tent", k=50)
        for file in (tmp_path / "live").iterdir():
            with file.open("r+b") as there:
                there.write(b"x" * file.stat().st_size)
        calls = (
            ("POST", "/phrases", {"phrases": [{"id": "n2", "text": "blue tent"}]}),
            ("POST", "/phrases/n1/pause", None),
            ("GET", "/phrases/n1", None),
            ("POST", "/admin/explain", {"query": "red tent", "ids": ["n1"]}),
        )
        for method, path, body in calls:
            refused = httpx.request(method, f"{server.url}{path}", json=body, timeout=20)
            assert refused.status_code == 503, (method, path, refused.text)
            assert refused.json()["type"] == "urn:bidmatch:store-damaged"
            assert "live.db is damaged" in refused.json()["detail"]
            assert "Restore it from a backup" in refused.json()["detail"]
        # What is in memory is still matched, and the service says what is wrong.
        assert connection.match("red tent", k=50) == before
        end = time.monotonic() + 20
        while not metric(connection.send("GET", "/metrics"), "bidmatch_degraded"):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert "live.db is damaged" in connection.send("GET", "/readyz")["degraded"]


def test_a_paused_phrase_is_explained(bundle: Path, tmp_path: Path) -> None:
    with served(bundle, tmp_path / "live") as server:
        connection = Connection(server)
        connection.put({"id": "n1", "text": "red tent"}, {"id": "n2", "text": "red tent"})
        connection.send("POST", "/phrases/n1/pause")
        connection.send("DELETE", "/phrases/n2")
        body = {"query": "red tent", "ids": ["n1", "n2", "n3", "a1"], "filter": {"market": "de"}}
        found = connection.send("POST", "/admin/explain", body)
        dropped = {one["id"]: one["dropped"] for one in found["candidates"]}
        assert (dropped["n1"], dropped["n2"]) == ("paused", "removed")
        assert found["missing"] == ["n3"]
        assert "a1" in dropped
