"""Joins requests in flight into micro-batches that a bounded pool of threads works on.

A thread that is free takes what waits, so alone a request waits for nothing; while all are busy requests
gather, and the batches grow up to the size that measurement found worth it. What waits is shared out among
the threads, those at work included, for they are free soon; and a request of many queries is worked on in
slices, between which others have their turn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Options = TypeVar("Options")
Answer = TypeVar("Answer")

# A request is refused where what is ahead of it would take this share of its timeout: accepted and then given
# up, it would only have cost work. The rest is for its own batch, and for what takes longer than of late.
_MOST_WAITING = 0.5
# Of queries that gather while all threads work; smaller ones cost more in batches than they save in waiting.
_LEAST_SHARE = 4
# Batches whose time tells how long the next ones take.
_BATCHES_REMEMBERED = 16


class QueueFullError(Exception):
    """No room for the request's queries. `retry_after` is a whole number of seconds."""

    def __init__(self, retry_after: int):
        super().__init__("the queue is full")
        self.retry_after = retry_after


class DeadlineError(Exception):
    """The request was not answered in time."""


class ClosedError(Exception):
    """The service is stopping."""


class Job(Generic[Options, Answer]):
    """The queries of one request.

    Attributes:
        queries: the queries.
        options: what is asked of all of them.
        answer: resolves to one answer a query.
        deadline: when it is given up, on `time.perf_counter`'s clock.
        since: when it came.
    """

    __slots__ = (
        "_answers",
        "_left",
        "_size",
        "_taken",
        "answer",
        "deadline",
        "options",
        "queries",
        "since",
    )

    def __init__(
        self, queries: list[str], options: Options, answer: asyncio.Future[list[Answer]], deadline: float
    ):
        self.queries, self.options, self.answer, self.deadline = queries, options, answer, deadline
        self.since = time.perf_counter()
        self._taken, self._left = 0, len(queries)
        self._answers: list[Answer | None] = [None] * len(queries)
        self._size = 0


class Pace:
    """Seconds of a thread that a query takes, over the latest batches.

    Left out are the longest batches per query, as many as there are threads: where the machine or the process
    stood still once, its batches say nothing of the next ones, and all of them took that long.

    Args:
        threads: batches worked on at once.

    Attributes:
        query_seconds: the mean.
    """

    def __init__(self, threads: int):
        self.query_seconds = 1e-3
        self._threads = threads
        self._latest: deque[tuple[float, int, float]] = deque(maxlen=_BATCHES_REMEMBERED + threads)

    def add(self, queries: int, seconds: float) -> None:
        """A batch of so many queries took so long."""
        self._latest.append((seconds / queries, queries, seconds))
        counted = sorted(self._latest)[: max(1, len(self._latest) - self._threads)]
        self.query_seconds = sum(one[2] for one in counted) / sum(one[1] for one in counted)


class Batcher(Generic[Options, Answer]):
    """Bounded queue, micro-batches, threads.

    `submit` and `close` belong to the event loop's thread.

    Args:
        run: `run(queries, options of each)` gives one answer a query; called in the pool's threads.
        threads: batches worked on at once.
        batch: queries that a batch has at most, asked anew for each.
        queue: most queries waiting.
        queue_bytes: most that the requests which wait may take, by `size_of`.
        size_of: bytes of a request's queries and options.
        begin: called first on each thread.
        on_batch: told of each batch, by the event loop when those who asked have their answers: the seconds
            that the requests which it began had waited; the options of each query; the answers, None where
            the work failed.

    Attributes:
        depth: queries waiting.
        closed: no more requests are taken.
    """

    def __init__(
        self,
        run: Callable[[list[str], list[Options]], Sequence[Answer]],
        *,
        threads: int,
        batch: Callable[[], int],
        queue: int,
        queue_bytes: int,
        size_of: Callable[[list[str], Options], int] = lambda queries, _options: sum(map(len, queries)),
        begin: Callable[[], None] = lambda: None,
        on_batch: Callable[
            [list[float], list[Options], Sequence[Answer] | None], None
        ] = lambda _waits, _options, _answers: None,
    ):
        self._run, self._batch, self._begin, self._on_batch = run, batch, begin, on_batch
        self._queue, self._queue_bytes, self._size_of, self._threads = queue, queue_bytes, size_of, threads
        self._lock = threading.Lock()
        self._waiting: deque[Job[Options, Answer]] = deque()
        # What wakes each idle thread, the one that worked last on top: its caches are the warmest.
        self._idle: list[threading.Semaphore] = []
        self.depth = self._bytes = 0
        self.closed = self._stopped = False
        self._pace = Pace(threads)
        self._in_work = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = [
            threading.Thread(target=self._serve, name=f"match-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._pool:
            thread.start()

    def submit(self, queries: list[str], options: Options, timeout: float) -> Job[Options, Answer]:
        """Queue a request; its `answer` raises DeadlineError when `timeout` seconds passed.

        Raises:
            QueueFullError: at once, where the queue has no room for these queries, or what is ahead of them
                would take most of the timeout.
            ClosedError: `close` was called.
        """
        if self.closed:
            raise ClosedError
        loop = asyncio.get_running_loop()
        self._loop = loop
        size = self._size_of(queries, options)
        with self._lock:
            full = self.depth + len(queries) > self._queue
            # One that is larger than the queue is taken where nothing waits.
            full |= self.depth > 0 and self._bytes + size > self._queue_bytes
            if full or (self.depth and self._wait() > _MOST_WAITING * timeout):
                raise QueueFullError(self.retry_after())
            job: Job[Options, Answer] = Job(
                queries, options, loop.create_future(), time.perf_counter() + timeout
            )
            job._size = size
            self._waiting.append(job)
            self.depth += len(queries)
            self._bytes += size
            bell = self._idle.pop() if self._idle else None
        if bell is not None:
            bell.release()
        timer = loop.call_later(timeout, self._late, job)
        job.answer.add_done_callback(lambda _: self._over(job, timer))
        return job

    def retry_after(self) -> int:
        """Whole seconds until what waits now is likely to be done, at least 1."""
        return max(1, round(self._wait()))

    def _wait(self) -> float:
        """Seconds until what waits and what is worked on now is likely to be done."""
        return (self.depth + self._in_work) * self._pace.query_seconds / self._threads

    def _late(self, job: Job[Options, Answer]) -> None:
        if not job.answer.done():
            job.answer.set_exception(DeadlineError())

    def _over(self, job: Job[Options, Answer], timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        if job._taken < len(job.queries):
            with self._lock:
                # It stays in line, empty, until a thread comes by.
                if job._taken < len(job.queries):
                    self._drop(job)

    def _drop(self, job: Job[Options, Answer]) -> None:
        self.depth -= len(job.queries) - job._taken
        self._bytes -= job._size
        job._taken = len(job.queries)

    def _serve(self) -> None:
        self._begin()
        bell = threading.Semaphore(0)
        size = 0
        while True:
            with self._lock:
                self._in_work -= size
                slices = self._take()
                size = sum(end - start for _, start, end in slices)
                self._in_work += size
                if not slices:
                    if self._stopped:
                        return
                    self._idle.append(bell)
            if slices:
                self._work(slices)
            else:
                bell.acquire()

    def _take(self) -> list[tuple[Job[Options, Answer], int, int]]:
        """The next batch, as slices of jobs: this thread's share of what waited longest. Holds the lock."""
        if not self.depth:
            # What is left in line nobody waits for: it must not wake one thread after the other.
            self._waiting.clear()
        room = min(self._batch(), self._share())
        slices: list[tuple[Job[Options, Answer], int, int]] = []
        now = time.perf_counter()
        unfinished = []
        while self._waiting and room > 0:
            job = self._waiting.popleft()
            start = job._taken
            if start == len(job.queries):
                continue
            if job.deadline <= now:
                self._drop(job)
                continue
            end = min(len(job.queries), start + room)
            job._taken = end
            room -= end - start
            self.depth -= end - start
            slices.append((job, start, end))
            if end < len(job.queries):
                unfinished.append(job)
            else:
                self._bytes -= job._size
        self._waiting.extend(unfinished)
        if self.depth and self._idle:
            self._idle.pop().release()
        return slices

    def _share(self) -> int:
        """The queries of all that wait that are this thread's."""
        idle = len(self._idle)
        if idle:
            return -(-self.depth // (1 + idle))
        return max(min(self.depth, _LEAST_SHARE), -(-self.depth // self._threads))

    def _work(self, slices: list[tuple[Job[Options, Answer], int, int]]) -> None:
        queries: list[str] = []
        options: list[Options] = []
        started = time.perf_counter()
        for job, start, end in slices:
            queries += job.queries[start:end]
            options += [job.options] * (end - start)
        answers: Sequence[Answer] | Exception
        try:
            answers = self._run(queries, options)
        except Exception as failure:
            answers = failure
        except BaseException as failure:
            # A panic in native code, or what else would end this thread: an error like others.
            answers = RuntimeError(repr(failure))
        seconds = time.perf_counter() - started
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, slices, options, answers, started)
        with self._lock:
            self._pace.add(len(queries), seconds)

    def _deliver(
        self,
        slices: list[tuple[Job[Options, Answer], int, int]],
        options: list[Options],
        answers: Sequence[Answer] | Exception,
        started: float,
    ) -> None:
        at = 0
        for job, start, end in slices:
            size = end - start
            if not job.answer.done():
                if isinstance(answers, Exception):
                    job.answer.set_exception(answers)
                else:
                    job._answers[start:end] = answers[at : at + size]
                    job._left -= size
                    if not job._left:
                        job.answer.set_result(job._answers)  # type: ignore[arg-type]
            at += size
        waits = [started - job.since for job, start, _ in slices if not start]
        found = None if isinstance(answers, Exception) else answers
        # Behind those who wait for these answers, who are next in the loop.
        asyncio.get_running_loop().call_soon(self._on_batch, waits, options, found)

    async def close(self) -> None:
        """Take no more requests, wait for what is in flight, stop the threads."""
        self.closed = True
        while True:
            with self._lock:
                if not (self.depth or self._in_work):
                    self._stopped = True
                    while self._idle:
                        self._idle.pop().release()
                    break
            await asyncio.sleep(0.005)
        for thread in self._pool:
            thread.join()
