"""Looks at a server from the side while it is under load: its memory, its probes, single requests."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import orjson

from bench.serving.processes import Server
from bidmatch.base.console import emit_json, say


def call(
    server: Server, method: str, path: str, body: Any = None, timeout: float = 60
) -> tuple[int, bytes, float]:
    """One request on a connection of its own: status (0: none came), body, seconds."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=timeout)
    started = time.monotonic()
    try:
        content = None if body is None else orjson.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(), time.monotonic() - started
    except (OSError, http.client.HTTPException) as failure:
        return 0, str(failure).encode(), time.monotonic() - started
    finally:
        connection.close()


class Watch:
    """Does something again and again on a thread of its own for as long as its block lasts.

    Args:
        look: what is done; what it returns is kept with the time before it began (`time.monotonic`).
        every: seconds from one beginning to the next.

    Attributes:
        seen: (time, what was returned), in order.
    """

    def __init__(self, look: Callable[[], Any], every: float):
        self._look, self._every = look, every
        self.seen: list[tuple[float, Any]] = []
        self.failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while not self._over.wait(max(0.0, due - time.monotonic())):
                began = time.monotonic()
                self.seen.append((began, self._look()))
                due = max(due + self._every, time.monotonic())
        except BaseException as failure:
            self.failure = failure

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self.failure is not None and error is None:
            raise self.failure


def memory_of(server: Server) -> Callable[[], dict[str, int]]:
    """For a Watch: the server's memory (see `Server.memory`)."""
    return server.memory


def calls_to(
    server: Server, method: str, path: str, body: Callable[[], Any] | None = None
) -> Callable[[], tuple[int, float]]:
    """For a Watch: status and seconds of a request."""

    def ask() -> tuple[int, float]:
        status, _, seconds = call(server, method, path, None if body is None else body(), timeout=10)
        return status, seconds

    return ask


def of_calls(seen: list[tuple[float, tuple[int, float]]]) -> dict[str, Any]:
    """How often which status came, and the slowest call and the 99th percentile, in milliseconds."""
    seconds = [taken for _, (_, taken) in seen] or [float("nan")]
    return {
        "statuses": {str(code): count for code, count in Counter(status for _, (status, _) in seen).items()},
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "max_ms": 1e3 * max(seconds),
    }


def median_between(
    seen: list[tuple[float, Mapping[str, int]]], start: float, end: float, field: str
) -> float:
    """Median of a field of what was seen in [start, end)."""
    return float(np.median([value[field] for moment, value in seen if start <= moment < end]))


def conclude(
    result: dict[str, Any], show: Callable[[dict[str, Any]], None], faults: list[str], *, as_json: bool
) -> None:
    """Give out a result, as JSON or by `show`, then name its faults.

    Raises:
        SystemExit: there are faults; with 1.
    """
    if as_json:
        emit_json(result)
    else:
        show(result)
    for fault in faults:
        say(f"MISSED: {fault}")
    if faults:
        raise SystemExit(1)
