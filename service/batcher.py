"""Joins requests in flight into micro-batches that a bounded pool of threads works on.

All state belongs to the event loop's thread; only `run` happens elsewhere. A batch starts as soon as a thread
is free, with all that waits then: alone a request waits for nothing, under load the batches grow.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class QueueFullError(Exception):
    """No room for the request's queries. `retry_after` is a whole number of seconds."""

    def __init__(self, retry_after: int):
        super().__init__("the queue is full")
        self.retry_after = retry_after


class DeadlineError(Exception):
    """The request was not answered in time."""


class ClosedError(Exception):
    """The service is stopping."""


@dataclass(eq=False)
class _Job(Generic[Answer]):
    queries: list[str]
    terms: tuple[int, float | None]
    answer: asyncio.Future[list[Answer]]
    since: float = field(default_factory=time.perf_counter)


class Batcher(Generic[Answer]):
    """Bounded queue, micro-batches, threads.

    Args:
        run: `run(queries, k, min_score)` gives one answer a query; called in the pool's threads.
        threads: batches worked on at once.
        max_batch: most queries in one call of `run`, unless one request alone has more.
        queue: most queries waiting.
        deadline: seconds after which a request is given up, waiting or not.
        on_batch: told the number of queries of each batch, and the seconds that each of its requests waited.

    Attributes:
        depth: queries waiting.
        closed: no more requests are taken.
    """

    def __init__(
        self,
        run: Callable[[list[str], int, float | None], list[Answer]],
        *,
        threads: int,
        max_batch: int,
        queue: int,
        deadline: float,
        on_batch: Callable[[int, list[float]], None] = lambda _size, _waits: None,
    ):
        self._run = run
        self._threads, self._max_batch, self._queue = threads, max_batch, queue
        self._deadline = deadline
        self._on_batch = on_batch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="match")
        self._waiting: OrderedDict[_Job[Answer], None] = OrderedDict()
        self._running: set[asyncio.Future[None]] = set()
        self.closed = False
        self._scheduled = False
        self.depth = 0

    async def submit(self, queries: list[str], k: int, min_score: float | None) -> list[Answer]:
        """One answer a query. Cancelling it takes the request out of the queue.

        Raises:
            QueueFullError: at once, where the queue has no room for these queries.
            DeadlineError: the deadline passed.
            ClosedError: `close` was called.
        """
        if self.closed:
            raise ClosedError
        if self.depth + len(queries) > self._queue:
            raise QueueFullError(max(1, round(self._deadline)))
        loop = asyncio.get_running_loop()
        job = _Job(queries, (k, min_score), loop.create_future())
        self._waiting[job] = None
        self.depth += len(queries)
        if not self._scheduled:
            # In the next turn of the loop, so that requests read in this turn join one batch.
            self._scheduled = True
            loop.call_soon(self._start_batches)
        try:
            async with asyncio.timeout(self._deadline):
                return await job.answer
        except TimeoutError as late:
            raise DeadlineError from late
        finally:
            self._leave(job)

    def _leave(self, job: _Job[Answer]) -> None:
        if job in self._waiting:
            del self._waiting[job]
            self.depth -= len(job.queries)

    def _start_batches(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._running) < self._threads:
            batch = self._next_batch()
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._work, batch)
            done = asyncio.ensure_future(self._finish(batch, future))
            self._running.add(done)
            done.add_done_callback(self._after)

    def _after(self, done: asyncio.Future[None]) -> None:
        self._running.discard(done)
        self._start_batches()

    def _next_batch(self) -> list[_Job[Answer]]:
        """The request that has waited longest and those behind it that ask for the same k and min_score."""
        batch: list[_Job[Answer]] = []
        size = 0
        for job in self._waiting:
            if batch and (size + len(job.queries) > self._max_batch):
                break
            if not batch or job.terms == batch[0].terms:
                batch.append(job)
                size += len(job.queries)
        for job in batch:
            self._leave(job)
        now = time.perf_counter()
        self._on_batch(size, [now - job.since for job in batch])
        return batch

    def _work(self, batch: list[_Job[Answer]]) -> list[Answer]:
        queries = [query for job in batch for query in job.queries]
        answers: list[Answer] = []
        for start in range(0, len(queries), self._max_batch):
            if start and all(job.answer.done() for job in batch):
                break  # No one waits for the rest any more.
            answers += self._run(queries[start : start + self._max_batch], *batch[0].terms)
        return answers

    async def _finish(self, batch: list[_Job[Answer]], work: asyncio.Future[list[Answer]]) -> None:
        try:
            answers = await work
        except Exception as failure:
            for job in batch:
                if not job.answer.done():
                    job.answer.set_exception(failure)
            return
        start = 0
        for job in batch:
            end = start + len(job.queries)
            if not job.answer.done():
                job.answer.set_result(answers[start:end])
            start = end

    async def close(self) -> None:
        """Take no more requests, wait for what is in flight, stop the threads."""
        self.closed = True
        while self._waiting or self._running:
            await asyncio.sleep(0.01)
        self._pool.shutdown()
