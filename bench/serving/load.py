"""The load generator: a process of its own, one thread, one epoll loop over kept-alive connections.

    echo JOB | python -m bench.serving.load        (see `Job`; what it found is printed as JSON)

Closed loop: every connection sends its next request when its last is answered, which finds the peak. Open
loop: requests are due at the times of a Poisson process, whether or not the server keeps up. Latency counts
from when a request was due, so a server that stalls does not make its clients ask less (no coordinated
omission); what is due while every connection is busy waits its turn, and is counted.

It shares the processors with the server it loads, so it is small: requests are made beforehand, answers are
read as far as their status and length, the clock is a timerfd (an event loop's timers are a millisecond
coarse). What it costs is in what it reports: `cpu_share`, and how late it sent (`sent_late_p99_ms`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bidmatch.base.errors import BidmatchError

_READ = 1 << 16
_clock = time.monotonic


@dataclass(frozen=True)
class Job:
    """What to ask, how, and for how long.

    Attributes:
        host: of the server.
        port: of the server.
        bodies: file of JSON bodies, one a line; they are asked in turn, and from the first again.
        seconds: that are measured.
        connections: open at once.
        rate: requests a second in an open loop; None for a closed one.
        path: of the POST.
        headers: further header lines.
        warm_up: seconds before those that are measured.
        first: line of `bodies` to begin with.
        seed: of the arrivals.
        drain: seconds that requests still out have to be answered in after the last was due.
        samples: file (.npy) for float64 (n, 3) of each measured request: seconds from the start of the
            measurement to when it was due (sent, in a closed loop), latency in seconds, status.
    """

    host: str
    port: int
    bodies: Path
    seconds: float
    connections: int
    rate: float | None = None
    path: str = "/match"
    headers: dict[str, str] = field(default_factory=dict)
    warm_up: float = 1.0
    first: int = 0
    seed: int = 0
    drain: float = 5.0
    samples: Path | None = None


@dataclass(frozen=True)
class Load:
    """What a load met with in the measured seconds.

    Attributes:
        per_second: answers of status 200 a second.
        p50_ms: median latency of these; likewise the others.
        p99_ms: see p50_ms.
        p999_ms: see p50_ms.
        max_ms: see p50_ms.
        statuses: status -> answers.
        due: requests that were due (open loop), or sent.
        unanswered: of these.
        broken: connections that the server closed on a request.
        waited: requests that were due while all connections were busy.
        sent_late_p99_ms: from when a request was due to when it was sent.
        asked_again: requests for a body that had been asked before.
        cpu_share: processor time of the generator, in processors.
        answer_bytes: mean length of the bodies of status 200.
        begun: when the measured seconds began, on the machine's monotonic clock.
    """

    per_second: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    statuses: dict[str, int]
    due: int
    unanswered: int
    broken: int
    waited: int
    sent_late_p99_ms: float
    asked_again: int
    cpu_share: float
    answer_bytes: float
    begun: float

    @property
    def failed(self) -> int:
        """Requests that got no answer, or one of another status than 200."""
        refused = sum(count for status, count in self.statuses.items() if status != "200")
        return refused + self.unanswered + self.broken


def start_load(job: Job) -> subprocess.Popen[bytes]:
    """The generator at work on the job; `finish_load` waits for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.serving.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(orjson.dumps(asdict(job), default=str))
    process.stdin.close()
    process.stdin = None
    return process


def finish_load(process: subprocess.Popen[bytes]) -> Load:
    """What it found.

    Raises:
        BidmatchError: it failed; it has said why on stderr.
    """
    told, _ = process.communicate()
    if process.returncode:
        raise BidmatchError(f"the load generator ended with code {process.returncode}")
    found: dict[str, Any] = orjson.loads(told)
    for name, value in found.items():
        if value is None:  # JSON has no NaN, which percentiles of nothing are
            found[name] = float("nan")
    return Load(**found)


def load(job: Job) -> Load:
    """Put the job's load on its server from a process of its own."""
    process = start_load(job)
    try:
        return finish_load(process)
    except BaseException:
        process.kill()
        process.wait()
        raise


class _Timer:
    """A file descriptor that becomes readable at a time of CLOCK_MONOTONIC, to the microsecond."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        nonblock = 0o4000
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, nonblock)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = (ctypes.c_long * 4)()  # struct itimerspec: interval, then value, each seconds and ns

    def at(self, moment: float) -> None:
        seconds = int(moment)
        self._spec[2], self._spec[3] = seconds, max(1, int((moment - seconds) * 1e9))
        absolute = 1
        if self._libc.timerfd_settime(self.fd, absolute, self._spec, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fd, 8)


class _Connection:
    """One request at a time on a kept-alive connection.

    Attributes:
        due: when the request that is out was due; negative where none is out.
    """

    __slots__ = ("due", "fd", "pending", "socket")

    def __init__(self, address: tuple[str, int]):
        try:
            self.socket = socket.create_connection(address, timeout=10)
        except OSError as failure:
            raise BidmatchError(f"{address[0]}:{address[1]} takes no connection: {failure}") from failure
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.fd = self.socket.fileno()
        self.due = -1.0
        self.pending = b""


def _requests(job: Job) -> list[bytes]:
    lines = (f"{name}: {value}\r\n" for name, value in job.headers.items())
    head = (
        f"POST {job.path} HTTP/1.1\r\nHost: {job.host}:{job.port}\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\n{''.join(lines)}Content-Length: "
    ).encode()
    bodies = job.bodies.read_bytes().splitlines()
    return [b"%b%d\r\n\r\n%b" % (head, len(body), body) for body in bodies]


def _answer(data: bytes) -> tuple[int, int] | None:
    """Status and body length of a whole answer; None while there is more to come.

    Raises:
        BidmatchError: it is none, has no Content-Length, or more follows it.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = data[:end].lower()
    at = head.find(b"\r\ncontent-length:")
    if at < 0 or not head.startswith(b"http/1.1 "):
        raise BidmatchError(f"no answer that the load generator reads: {data[:200]!r}")
    stop = head.find(b"\r", at + 2)
    length = int(head[at + 17 : stop if stop > 0 else None])
    whole = end + 4 + length
    if len(data) < whole:
        return None
    if len(data) > whole:
        raise BidmatchError("the server sent more than it was asked for")
    return int(head[9:12]), length


class _Generator:
    def __init__(self, job: Job):
        self._job = job
        self._requests = _requests(job)
        self._next = job.first
        self._address = (job.host, job.port)
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._begin = self._end = 0.0  # of the measurement
        self._due, self._latency, self._status = array("d"), array("d"), array("d")
        self._late = array("d")
        self._bytes = self._broken = 0
        self._cpu = self._cpu_since = 0.0

    def run(self) -> Load:
        for _ in range(self._job.connections):
            self._connect()
        gc.collect()
        gc.freeze()
        started = _clock()
        self._begin = started + self._job.warm_up
        self._end = self._begin + self._job.seconds
        due = self._closed() if self._job.rate is None else self._open(started, self._job.rate)
        return self._found(*due)

    def _connect(self) -> _Connection:
        connection = _Connection(self._address)
        self._connections[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)
        return connection

    def _send(self, connection: _Connection, due: float) -> None:
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        connection.due = due
        try:
            sent = connection.socket.send(request)
        except ConnectionError:
            return  # What the server closed shows as readable, and is counted there.
        if sent != len(request):
            raise BidmatchError("a request did not fit into the socket's buffer")

    def _receive(self, connection: _Connection) -> bool:
        """Whether the request that was out is answered. A connection that the server ends is forgotten."""
        try:
            data = connection.socket.recv(_READ)
        except ConnectionError:
            data = b""
        if not data or connection.due < 0:  # what comes unasked, such as a 408, comes before the end
            return self._lost(connection)
        if connection.pending:
            data = connection.pending + data
        answer = _answer(data)
        if answer is None:
            connection.pending = data
            return False
        connection.pending = b""
        now = _clock()
        due, connection.due = connection.due, -1.0
        # A closed loop has no schedule: what counts is what was answered within the measured seconds.
        counts = self._begin <= (now if self._job.rate is None else due) < self._end
        if counts:
            self._due.append(due - self._begin)
            self._latency.append(now - due)
            self._status.append(answer[0])
            if answer[0] == 200:
                self._bytes += answer[1]
        return True

    def _lost(self, connection: _Connection) -> bool:
        self._epoll.unregister(connection.fd)
        del self._connections[connection.fd]
        connection.socket.close()
        self._broken += connection.due >= self._begin
        return False

    def _poll(self, timeout: float) -> list[tuple[int, int]]:
        now = _clock()
        if not self._cpu and now >= self._begin:
            self._cpu = time.process_time()
            self._cpu_since = now
        return self._epoll.poll(timeout)

    def _closed(self) -> tuple[int, int, int]:
        """Requests sent while measured, unanswered, and having waited for a connection."""
        for connection in list(self._connections.values()):
            self._send(connection, _clock())
        while _clock() < self._end:
            for fd, _ in self._poll(0.1):
                connection = self._connections[fd]
                if self._receive(connection):
                    self._send(connection, _clock())
                elif fd not in self._connections:
                    self._send(self._connect(), _clock())
        return len(self._due), 0, 0

    def _open(self, started: float, rate: float) -> tuple[int, int, int]:
        """Requests due while measured, unanswered, and having waited for a connection."""
        job = self._job
        rng = np.random.default_rng(job.seed)
        whole = job.warm_up + job.seconds
        gaps = rng.exponential(1 / rate, int(whole * rate + 10 * (whole * rate) ** 0.5 + 10))
        moments = np.cumsum(gaps)
        schedule = (started + moments[moments < whole]).tolist()
        free = deque(self._connections.values())
        waiting: deque[float] = deque()
        waited = position = 0
        timer = _Timer()
        self._epoll.register(timer.fd, select.EPOLLIN)
        until = self._end + job.drain
        out = 0
        while (position < len(schedule) or waiting or out) and (now := _clock()) < until:
            while position < len(schedule) and schedule[position] <= now:
                due = schedule[position]
                position += 1
                if free:
                    self._send_late(free.popleft(), due)
                    out += 1
                else:
                    waiting.append(due)
                    waited += due >= self._begin
            if position < len(schedule):
                timer.at(schedule[position])
            for fd, _ in self._poll(0.1):
                if fd == timer.fd:
                    timer.clear()
                    continue
                connection = self._connections[fd]
                idle = connection.due < 0
                if self._receive(connection):
                    out -= 1
                elif fd not in self._connections:
                    out -= not idle
                    if idle:
                        free.remove(connection)
                    connection = self._connect()
                else:
                    continue
                if waiting:
                    self._send_late(connection, waiting.popleft())
                    out += 1
                else:
                    free.append(connection)
        measured = int(np.searchsorted(schedule, self._begin))
        due_in_all = len(schedule) - measured
        return due_in_all, due_in_all - len(self._due) - self._broken, waited

    def _send_late(self, connection: _Connection, due: float) -> None:
        self._send(connection, due)
        if due >= self._begin:
            self._late.append(_clock() - due)

    def _found(self, due: int, unanswered: int, waited: int) -> Load:
        wall = _clock() - self._cpu_since
        cpu = time.process_time() - self._cpu
        status, latency = np.frombuffer(self._status), np.frombuffer(self._latency)
        good = latency[status == 200]
        if self._job.samples is not None:
            np.save(self._job.samples, np.stack([np.frombuffer(self._due), latency, status], axis=1))
        p50, p99, p999 = np.percentile(good, [50, 99, 99.9]) * 1e3 if len(good) else [np.nan] * 3
        asked = self._next - self._job.first
        return Load(
            per_second=len(good) / self._job.seconds,
            p50_ms=float(p50),
            p99_ms=float(p99),
            p999_ms=float(p999),
            max_ms=float(1e3 * good.max(initial=0.0)),
            statuses={str(int(code)): count for code, count in sorted(Counter(status.tolist()).items())},
            due=due,
            unanswered=max(0, unanswered),
            broken=self._broken,
            waited=waited,
            sent_late_p99_ms=float(1e3 * np.percentile(self._late, 99)) if self._late else 0.0,
            asked_again=max(0, asked - len(self._requests)),
            cpu_share=cpu / wall,
            answer_bytes=self._bytes / max(1, len(good)),
            begun=self._begin,
        )


def raise_file_limit() -> None:
    """Allow as many open files as this process may have: one connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Read a job from stdin, do it, print what it met with."""
    raise_file_limit()
    job = orjson.loads(sys.stdin.buffer.read())
    paths = {name: Path(job[name]) for name in ("bodies", "samples") if job[name] is not None}
    sys.stdout.buffer.write(orjson.dumps(asdict(_Generator(Job(**job | paths)).run())))


if __name__ == "__main__":
    try:
        main()
    except (BidmatchError, OSError) as wrong:
        raise SystemExit(f"load generator: {wrong}") from wrong
