"""What the engine can do without HTTP: encode and search in a tight loop, in a process of its own.

    python -m bench.serving.ceiling BUNDLE QUERIES K

Reads one JSON object a line from stdin and answers each with one on stdout:

    {"batch": 16, "threads": 2, "seconds": 5}   -> {"per_second": queries a second}
    {"first": 0, "count": 100}                  -> {"seconds": [of each query alone, on one thread]}
    {"found": 0, "count": 100}                  -> {"ids": [ids of each query's matches, best first]}
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from bidmatch.base.errors import BidmatchError
from service.engine import Engine

_WARM_UP_S = 0.5


def tight_loop(
    engine: Engine, queries: list[str], k: int, *, batch: int, threads: int, seconds: float
) -> float:
    """Queries a second of `threads` threads, each matching batch after batch."""
    done = [0.0] * threads
    begin = time.monotonic() + _WARM_UP_S
    end = begin + seconds
    starts = itertools.count(0, batch)

    def work(thread: int) -> None:
        while (now := time.monotonic()) < end:
            first = next(starts) % len(queries)
            some = queries[first : first + batch]
            engine.match(some, k)
            # What straddles an end counts by the share of its time within.
            after = time.monotonic()
            within = max(0.0, min(after, end) - max(now, begin))
            done[thread] += len(some) * within / (after - now)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / seconds


def alone(engine: Engine, queries: list[str], k: int) -> list[float]:
    """Seconds of each query by itself."""
    taken = []
    for query in queries:
        started = time.perf_counter()
        engine.match([query], k)
        taken.append(time.perf_counter() - started)
    return taken


def found(engine: Engine, queries: list[str], k: int) -> list[list[str]]:
    """Ids of each query's matches, best first."""
    matches = engine.match(queries, k)
    ids = engine.phrases(matches.rows)["id"].to_pylist()
    return [ids[start:end] for start, end in itertools.pairwise(matches.offsets.tolist())]


class Ceiling:
    """The engine in its own process, as its owner asks it.

    Args:
        process: this module, started by `engine_alone`.
    """

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    def _ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(question) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BidmatchError(f"the engine's process ended with code {self._process.wait()}")
        return orjson.loads(line)

    def per_second(self, batch: int, threads: int, seconds: float) -> float:
        """Queries a second of that many threads, each matching batches of that many queries."""
        return float(self._ask(batch=batch, threads=threads, seconds=seconds)["per_second"])

    def alone(self, first: int, count: int) -> list[float]:
        """Seconds of each of these queries by itself, on one thread."""
        return list(self._ask(first=first, count=count)["seconds"])

    def ids(self, first: int, count: int) -> list[list[str]]:
        """Ids of each of these queries' matches, best first."""
        return list(self._ask(found=first, count=count)["ids"])


@contextmanager
def engine_alone(bundle: Path, queries: Path, k: int) -> Iterator[Ceiling]:
    """A process with the bundle's engine in it."""
    command = [sys.executable, "-m", "bench.serving.ceiling", str(bundle), str(queries), str(k)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Ceiling(process)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Answer questions until stdin ends."""
    bundle, file, k = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    queries = file.read_text(encoding="utf-8").splitlines()
    engine = Engine.load(bundle)
    engine.match(queries[:64], k)
    for line in sys.stdin.buffer:
        question = orjson.loads(line)
        answer: dict[str, Any]
        if "batch" in question:
            answer = {"per_second": tight_loop(engine, queries, k, **question)}
        else:
            first = question.get("first", question.get("found")) % len(queries)
            some = (queries + queries)[first : first + question["count"]]
            answer = (
                {"ids": found(engine, some, k)}
                if "found" in question
                else {"seconds": alone(engine, some, k)}
            )
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
