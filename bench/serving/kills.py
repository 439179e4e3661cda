"""20 `kill -9` of a worker and 20 of the parent, under load with live adds: nothing acknowledged may be lost.

    python -m bench.serving.kills [--json] [--kills 20] [--workers 2] [--work runs/bench-serving]

1,000,000 phrases x 64, MiniLM-L6 in 8 bits. Clients ask and add all the time, on connections of their own,
and connect again when one breaks. By turns a worker is killed, and the parent. After a worker's death the
time is taken until all workers answer again; after the parent's, until its workers have ended by themselves,
and from the start of a new service to its first answer. Then each add that was acknowledged since the last
look must be there, by its id and as the first match of its own text; in the end all of them must.

`--bundle` names another bundle than the one that this makes. Exits with 1 where an add was lost, workers did
not end, or a probe of the running service failed while one worker was left to answer.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import orjson

from bench.serving.bundles import WORK, bundle_of, queries_of
from bench.serving.load import raise_file_limit
from bench.serving.processes import Server, bidmatch, end_in_order, flags_for, serve_options
from bench.serving.recipe import minilm
from bench.serving.watch import call, conclude
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError

ASKERS, ADDERS = 8, 4
LOAD_S = 1.5
END_LIMIT_S, START_LIMIT_S = 30.0, 180.0
_ASKED_AT_ONCE = 200


class Clients:
    """Ask and add until they are told to stop, whatever becomes of the server.

    Args:
        server: whose.
        queries: to ask, and to make phrases of.
        first: number of the first phrase to add.

    Attributes:
        acknowledged: number and text of each phrase whose add was answered 200.
        tried: numbers of all phrases that were sent.
        statuses: what was done and its status (0: no answer) -> how often.
    """

    def __init__(self, server: Server, queries: list[str], first: int):
        self._address = server.host, server.port
        self._queries = queries
        self._lock = threading.Lock()
        self._next = first
        self._over = threading.Event()
        self.acknowledged: dict[int, str] = {}
        self.tried: set[int] = set()
        self.statuses: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(ASKERS)]
        self._threads += [threading.Thread(target=self._add) for _ in range(ADDERS)]

    def _send(self, connection: http.client.HTTPConnection, what: str, path: str, body: Any) -> int:
        status = 0
        try:
            connection.request("POST", path, orjson.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection.close()
            time.sleep(0.01)
        with self._lock:
            self.statuses[f"{what} {status}"] += 1
        return status

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        connection = http.client.HTTPConnection(*self._address, timeout=10)
        while not self._over.is_set():
            self._send(connection, "ask", "/match", {"query": draw.choice(self._queries), "k": 10})
        connection.close()

    def _add(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=10)
        while not self._over.is_set():
            with self._lock:
                number = self._next
                self._next += 1
                self.tried.add(number)
            text = text_of(self._queries, number)
            phrases = [{"id": name_of(number), "text": text}]
            if self._send(connection, "add", "/phrases", {"phrases": phrases}) == 200:
                with self._lock:
                    self.acknowledged[number] = text
        connection.close()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def name_of(number: int) -> str:
    """Id of an added phrase."""
    return f"kill-{number}"


def text_of(queries: list[str], number: int) -> str:
    """Its text, which no other has."""
    return f"{queries[number % len(queries)]} {number}"


def lost(server: Server, added: dict[int, str]) -> list[int]:
    """The numbers of phrases that are not there, by id or as the first match of their text."""
    missing = []
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    for number in added:
        connection.request("GET", f"/phrases/{name_of(number)}")
        answer = connection.getresponse()
        found = orjson.loads(answer.read())
        if answer.status != 200 or found["state"] != "active" or found["text"] != added[number]:
            missing.append(number)
    numbers = list(added)
    for start in range(0, len(numbers), _ASKED_AT_ONCE):
        some = numbers[start : start + _ASKED_AT_ONCE]
        body = {"queries": [added[number] for number in some], "k": 1}
        headers = {"Content-Type": "application/json", "X-Request-Timeout-Ms": "10000"}
        connection.request("POST", "/match", orjson.dumps(body), headers)
        answer = connection.getresponse()
        found = orjson.loads(answer.read())
        if answer.status != 200:
            raise BidmatchError(f"POST /match: {answer.status} {found}")
        for number, result in zip(some, found["results"], strict=True):
            if [match["id"] for match in result["matches"]] != [name_of(number)]:
                missing.append(number)
    connection.close()
    return sorted(set(missing))


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listens(pid: int, server: Server) -> bool:
    """Whether a process waits for connections to the server: its event loop does."""
    inode = None
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].partition(":")[2], 16) == server.port and fields[3] == "0A":
            inode = fields[9]
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fdinfo").iterdir():
            waits = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("tfd:")]
            for fd in waits:
                if str(Path(f"/proc/{pid}/fd/{fd}").readlink()) == f"socket:[{inode}]":
                    return True
    return False


def kill_worker(server: Server, draw: random.Random, count: int) -> dict[str, float]:
    """Kill one of the workers; seconds until as many answer as before, and probes that failed meanwhile."""
    victim = draw.choice(children(server.process.pid))
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    failed = 0
    while time.monotonic() - began < START_LIMIT_S:
        # Other clients' connections are on it as likely as not; a new one goes to those that are left.
        if call(server, "GET", "/readyz", timeout=10)[0] != 200:
            failed += 1
        now = [pid for pid in children(server.process.pid) if pid != victim]
        if len(now) == count and all(listens(pid, server) for pid in now):
            return {"back_s": time.monotonic() - began, "failed": failed}
        time.sleep(0.01)
    raise BidmatchError("the worker that was killed does not come back", hint=f"See {server.log}.")


def kill_parent(server: Server) -> float:
    """Kill the parent; seconds until its workers have ended by themselves.

    Raises:
        BidmatchError: they have not.
    """
    server.process.kill()
    server.process.wait()
    began = time.monotonic()
    while server.pids():
        if time.monotonic() - began > END_LIMIT_S:
            raise BidmatchError("workers outlive their parent", hint=f"See {server.log}.")
        time.sleep(0.01)
    return time.monotonic() - began


def kills(
    bundle: Path, queries: list[str], logs: Path, flags: list[str], count: int, workers: int
) -> dict[str, Any]:
    """The figures."""
    draw = random.Random(0)
    statuses: Counter[str] = Counter()
    added: dict[int, str] = {}
    tried = 0
    ready_s, ends_s, back_s, failed_probes, missing = [], [], [], 0, []
    for turn in range(count + 1):
        started = time.monotonic()
        with bidmatch("kills", bundle, logs, flags) as server:
            if call(server, "POST", "/match", {"query": queries[turn], "k": 10})[0] != 200:
                raise BidmatchError("the service does not answer", hint=f"See {server.log}.")
            ready_s.append(time.monotonic() - started)
            last = turn == count
            missing += lost(server, added if last else dict(list(added.items())[-1000:]))
            if last:
                break
            with Clients(server, queries, tried) as clients:
                time.sleep(LOAD_S)
                if workers > 1:
                    found = kill_worker(server, draw, workers)
                    back_s.append(found["back_s"])
                    failed_probes += int(found["failed"])
                    time.sleep(LOAD_S)
                ends_s.append(kill_parent(server))
            added |= clients.acknowledged
            tried += len(clients.tried)
            statuses += clients.statuses
            say(f"{turn + 1} of {count}: {len(added):,} adds acknowledged, {len(missing)} lost")
    return {
        "worker_kills": len(back_s),
        "parent_kills": len(ends_s),
        "adds_tried": tried,
        "adds_acknowledged": len(added),
        "adds_lost": len(set(missing)),
        "statuses": dict(statuses),
        "worker_back_median_s": float(np.median(back_s)) if back_s else None,
        "worker_back_max_s": max(back_s, default=None),
        "probes_failed": failed_probes,
        "workers_end_max_s": max(ends_s),
        "start_to_answer_median_s": float(np.median(ready_s[1:])),
        "start_to_answer_max_s": max(ready_s[1:]),
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = []
    if result["adds_lost"]:
        found.append(f"{result['adds_lost']} acknowledged adds are lost")
    if result["probes_failed"]:
        found.append(f"{result['probes_failed']} probes failed while a worker was left to answer")
    odd = [name for name in result["statuses"] if name.split()[1] not in ("0", "200", "429", "503", "504")]
    if odd:
        found.append(f"answers nobody should get: {odd}")
    return found


def show(result: dict[str, Any]) -> None:
    """The figures for people."""
    of = SimpleNamespace(**result)
    click.echo(
        f"{of.worker_kills} kills of a worker, {of.parent_kills} of the parent: {of.adds_acknowledged:,} "
        f"adds acknowledged, {of.adds_lost} lost\n{of.statuses}\na worker is back after "
        f"{of.worker_back_median_s or 0:.2f} s at the median, {of.worker_back_max_s or 0:.2f} s at most; "
        f"{of.probes_failed} probes failed meanwhile\nworkers end within {of.workers_end_max_s:.2f} s of "
        f"their parent; start to first answer {of.start_to_answer_median_s:.2f} s at the median, "
        f"{of.start_to_answer_max_s:.2f} s at most"
    )


@click.command()
@click.option("--work", default=WORK, show_default=True, type=click.Path(path_type=Path))
@click.option("--phrases", default=1_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--bundle", type=click.Path(path_type=Path))
@click.option("--kills", "count", default=20, show_default=True, type=click.IntRange(1))
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def main(work: Path, phrases: int, bundle: Path | None, count: int, workers: int, as_json: bool) -> None:
    """Kills of workers and of the parent."""
    raise_file_limit()
    end_in_order()
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bidmatch-kills-") as folder:
        queries = queries_of(work, phrases)
        served = bundle or bundle_of(work, minilm(phrases), queries)
        flags = flags_for(serve_options(), workers=workers, live=Path(folder) / "live")
        result = kills(served, queries, logs, flags, count, workers)
    conclude(result, show, faults(result), as_json=as_json)


if __name__ == "__main__":
    try:
        main()
    except BidmatchError as wrong:
        say(f"error: {wrong}")
        raise SystemExit(wrong.exit_code) from wrong
