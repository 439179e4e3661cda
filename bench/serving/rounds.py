"""The measurement: servers are tuned once, then measured in turns, round after round."""

from __future__ import annotations

import http.client
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from bench.serving.ceiling import Ceiling
from bench.serving.load import Job, Load, load
from bench.serving.processes import Server
from bidmatch.base.console import say
from bidmatch.base.errors import BidmatchError

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (50, 70, 90)
SAME_SHARE = 70
_ALONE_S, _ALONE_QUERIES, _ALONE_BLOCKS = 0.6, 150, 4
# Of a setting's throughput that a smaller one may be behind and still be taken.
_TIE = 0.02
# A connection that no request needs for some seconds is closed by uvicorn.
_OPEN_CONNECTIONS = 256


@dataclass(frozen=True)
class Settings:
    """How long and how much.

    Attributes:
        rounds: of measurement.
        closed_s: of each closed loop in front of MiniLM.
        open_s: of each open loop.
        http_s: of each closed loop where HTTP is the cost.
        tuning_s: of each setting tried before the rounds.
        connections: of the closed loops whose p99 is compared.
        k: matches asked for.
        cores: processors that all share.
    """

    rounds: int
    closed_s: float
    open_s: float
    http_s: float
    tuning_s: float
    connections: int
    k: int
    cores: int


@dataclass
class Target:
    """A server under load, with all that it is made of.

    Attributes:
        name: for people.
        server: that is asked.
        bodies: file of what it is asked.
        others: servers that it needs at work.
        tried: connections to tune with.
        connections: of these, those of the most answers a second.
        tuned: answers a second with these, before the rounds.
    """

    name: str
    server: Server
    bodies: Path
    others: tuple[Server, ...] = ()
    tried: tuple[int, ...] = (16, 32, 64, 128)
    connections: int = 0
    tuned: float = 0.0

    @property
    def servers(self) -> tuple[Server, ...]:
        """All that has to be at work."""
        return (self.server, *self.others)


@contextmanager
def at_work(target: Target) -> Iterator[None]:
    """Within it the target runs; before and after, its processes are stopped."""
    for server in target.servers:
        server.resume()
    try:
        yield
    finally:
        for server in target.servers:
            server.pause()


class Measurement:
    """What is found, round by round.

    Attributes:
        loads: name -> the load of each round.
        numbers: name -> a number of each round.
        samples: name -> latencies in milliseconds, float64 (n,), of each round.
    """

    def __init__(self, settings: Settings, scratch: Path):
        self.settings = settings
        self.loads: dict[str, list[Load]] = defaultdict(list)
        self.numbers: dict[str, list[float]] = defaultdict(list)
        self.samples: dict[str, list[np.ndarray]] = defaultdict(list)
        self._scratch = scratch
        self._asked = 0

    def put(
        self,
        target: Target,
        seconds: float,
        connections: int,
        *,
        rate: float | None = None,
        warm_up: float = 1.0,
        name: str | None = None,
    ) -> Load:
        """One load on the target; kept under `name` where that is given.

        Raises:
            BidmatchError: there were answers, and none of them with 200.
        """
        samples = self._scratch / "samples.npy"
        server = target.server
        # Each load begins where the last one may have ended, so that queries do not come again soon.
        job = Job(
            server.host,
            server.port,
            target.bodies,
            seconds,
            connections,
            rate=rate,
            warm_up=warm_up,
            first=self._asked,
            seed=self._asked,
            samples=samples,
        )
        with at_work(target):
            before, started = sum(one.cpu_seconds() for one in target.servers), time.monotonic()
            try:
                met = load(job)
            except BidmatchError as failure:
                raise BidmatchError(f"{target.name}: {failure}", hint=f"See {server.log}.") from failure
            wall = time.monotonic() - started
            used = sum(one.cpu_seconds() for one in target.servers) - before
        self._asked += met.due + 101
        told = f"{met.statuses}, {met.unanswered} unanswered, {met.broken} broken connections"
        if met.statuses and not met.per_second:
            raise BidmatchError(f"{target.name} answers nothing: {told}")
        if met.failed:
            say(f"{target.name}: {met.failed:,} of {met.due:,} requests failed: {told}")
        if name is not None:
            milliseconds = np.load(samples)[:, 1] * 1e3
            if not len(milliseconds):
                raise BidmatchError(f"{target.name} answered nothing in {seconds:g} s: {told}")
            self.loads[name].append(met)
            self.samples[name].append(milliseconds)
            self.numbers[f"{name}_server_cpus"].append(used / wall)
        return met

    def again(self, name: str, other: str) -> None:
        """Let the last load of `name` stand under another name, too."""
        self.loads[other].append(self.loads[name][-1])
        self.numbers[f"{other}_server_cpus"].append(self.numbers[f"{name}_server_cpus"][-1])

    @property
    def asked(self) -> int:
        """Position among the queries where the next load begins."""
        return self._asked

    def peak(self, name: str, target: Target) -> float:
        """Answers a second of a target at its best number of connections: the median of what is known."""
        return statistics.median([target.tuned, *(met.per_second for met in self.loads[name])])

    def tune(self, target: Target, seconds: float) -> None:
        """Choose the target's connections: the fewest within 2% of the most answers a second."""
        found = {}
        for connections in target.tried:
            met = self.put(target, seconds, connections, warm_up=0.7)
            found[connections] = met.per_second
        target.connections = fewest_of_best(found)
        target.tuned = found[target.connections]
        say(
            f"{target.name}: "
            + ", ".join(f"{count} connections {rate:,.0f}/s" for count, rate in found.items())
            + f"; {target.connections} taken"
        )


def fewest_of_best(found: dict[int, float]) -> int:
    """The least setting within 2% of the largest number."""
    best = max(found.values())
    return min(setting for setting, number in found.items() if number >= (1 - _TIE) * best)


def tune_ceiling(engine: Ceiling, settings: Settings) -> int:
    """The batch size of the most queries a second, the engine on all cores."""
    found = {batch: engine.per_second(batch, settings.cores, settings.tuning_s) for batch in BATCHES}
    batch = max(found, key=lambda size: found[size])
    say(
        "engine without HTTP: "
        + ", ".join(f"batches of {size} {rate:,.0f}/s" for size, rate in found.items())
        + f"; {batch} taken"
    )
    return batch


def answers_of(target: Target, bodies: Sequence[bytes]) -> list[bytes]:
    """What the target answers to these bodies, one after another.

    Raises:
        BidmatchError: it does not answer 200.
    """
    contents = []
    with at_work(target):
        connection = http.client.HTTPConnection(target.server.host, target.server.port, timeout=30)
        for body in bodies:
            connection.request("POST", "/match", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            contents.append(answer.read())
            if answer.status != 200:
                raise BidmatchError(f"{target.name} answered {answer.status}: {contents[-1][:300]!r}")
        connection.close()
    return contents


def overlap(target: Target, bodies: Sequence[bytes], ids: Sequence[list[str]]) -> float:
    """Mean share of these ids that the target's answers have, too."""
    shares = []
    for content, wanted in zip(answers_of(target, bodies), ids, strict=True):
        found = {match["id"] for match in orjson.loads(content)["matches"]}
        shares.append(len(found & set(wanted)) / max(1, len(wanted)))
    return statistics.mean(shares)


@dataclass
class Targets:
    """All that is measured.

    Attributes:
        engine: the engine of the MiniLM bundle without HTTP.
        batch: its best batch size.
        ours: the service with that bundle, its cache off.
        naive: the service most people write.
        infinity: the gateway in front of infinity-emb; None where it is left out.
        bag: the service with the `bag` encoder, its cache off.
        wide: the same, re-scoring.
        route: the empty route.
        cached: the service with the `bag` encoder, asked what its cache holds; None where it has no cache.
    """

    engine: Ceiling
    batch: int
    ours: Target
    naive: Target
    infinity: Target | None
    bag: Target
    wide: Target
    route: Target
    cached: Target | None


def measure_round(targets: Targets, found: Measurement, *, backwards: bool) -> None:
    """Everything once; every other round goes backwards, so that a drift of the machine favours nobody."""
    steps = [_peaks, _peers, _open_loops, _same_rate, _alone, _http]
    for step in reversed(steps) if backwards else steps:
        step(targets, found)


def _ceiling(targets: Targets, found: Measurement) -> float:
    settings = found.settings
    return targets.engine.per_second(targets.batch, settings.cores, settings.closed_s)


def _peaks(targets: Targets, found: Measurement) -> None:
    """The engine's ceiling, the service's peak, and the ceiling again."""
    ours, settings = targets.ours, found.settings
    before = _ceiling(targets, found)
    found.put(ours, settings.closed_s, ours.connections, name="ours")
    found.numbers["ceiling"].append((before + _ceiling(targets, found)) / 2)


def _peers(targets: Targets, found: Measurement) -> None:
    """Each at its best number of connections, and all at the same."""
    settings = found.settings
    for name, target in (("naive", targets.naive), ("infinity", targets.infinity)):
        if target is not None:
            found.put(target, settings.closed_s, target.connections, name=name)
            if target.connections == settings.connections:
                found.again(name, f"{name}_same_connections")
            else:
                found.put(target, settings.closed_s, settings.connections, name=f"{name}_same_connections")
    found.put(targets.ours, settings.closed_s, settings.connections, name="ours_same_connections")


def _open_loops(targets: Targets, found: Measurement) -> None:
    """Arrivals on a clock at shares of the peak, as far as that is known by now."""
    for share in SHARES:
        rate = share / 100 * found.peak("ours", targets.ours)
        found.put(targets.ours, found.settings.open_s, _OPEN_CONNECTIONS, rate=rate, name=f"open_{share}")


def _same_rate(targets: Targets, found: Measurement) -> None:
    """Both services at 70% of what the naive one carries."""
    rate = max(1.0, SAME_SHARE / 100 * found.peak("naive", targets.naive))
    for name, target in (("naive_same_rate", targets.naive), ("ours_same_rate", targets.ours)):
        found.put(target, found.settings.open_s, found.settings.connections, rate=rate, name=name)


def _alone(targets: Targets, found: Measurement) -> None:
    """One request at a time over HTTP, and one query at a time by the engine, in blocks that take turns."""
    http_ms: list[np.ndarray] = []
    engine_ms: list[float] = []
    for _ in range(_ALONE_BLOCKS):
        first = found.asked
        found.put(targets.ours, _ALONE_S, 1, warm_up=0.2, name="alone_block")
        http_ms.append(found.samples["alone_block"][-1])
        engine_ms += [1e3 * seconds for seconds in targets.engine.alone(first, _ALONE_QUERIES)]
    found.samples["alone"].append(np.concatenate(http_ms))
    found.samples["engine_alone"].append(np.array(engine_ms))


def _http(targets: Targets, found: Measurement) -> None:
    """What HTTP costs: the empty route between each two of the others."""
    for name, target in (("bag", targets.bag), ("wide", targets.wide), ("cached", targets.cached)):
        if target is None:
            continue
        seconds = found.settings.http_s
        route = targets.route
        before = found.put(route, seconds, route.connections, name="route").per_second
        found.put(target, seconds, target.connections, name=name)
        after = found.put(route, seconds, route.connections, name="route").per_second
        found.numbers[f"{name}_route"].append((before + after) / 2)
