from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from service.batcher import Batcher, ClosedError, DeadlineError, QueueFullError

Call = tuple[list[str], int, float | None]


class Work:
    """Work that can be held up: answers each query with its upper case, and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, queries: list[str], k: int, min_score: float | None) -> list[str]:
        self.calls.append((queries, k, min_score))
        assert self.go.wait(10)
        if "fail" in queries:
            raise RuntimeError("no such luck")
        return [query.upper() for query in queries]


def batcher(work: Work, **changed: Any) -> Batcher[str]:
    defaults: dict[str, Any] = {"threads": 1, "max_batch": 4, "queue": 6, "deadline": 5.0}
    return Batcher(work, **(defaults | changed))


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def hold(work: Work, batches: Batcher[str]) -> asyncio.Task[list[str]]:
    """Occupy the one thread until `work.go` is set."""
    work.go.clear()
    task = asyncio.ensure_future(batches.submit(["held"], 1, None))
    await until(lambda: len(work.calls) == 1)
    return task


def test_each_request_gets_its_own_answers_whatever_batch_it_was_in() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, threads=2, queue=1000)
        asked = [[f"q{i}-{j}" for j in range(i % 6)] for i in range(100)]
        answers = await asyncio.gather(*(batches.submit(one, 1 + i % 3, None) for i, one in enumerate(asked)))
        assert answers == [[query.upper() for query in one] for one in asked]
        assert batches.depth == 0

    play(scene)


def test_waiting_requests_of_the_same_terms_join_one_batch_in_order_of_arrival() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        tasks = [
            asyncio.ensure_future(batches.submit(queries, k, None))
            for queries, k in [(["a"], 5), (["b"], 9), (["c", "d"], 5), (["e"], 5)]
        ]
        await until(lambda: batches.depth == 5)
        work.go.set()
        await asyncio.gather(held, *tasks)
        assert work.calls[1:] == [(["a", "c", "d", "e"], 5, None), (["b"], 9, None)]

    play(scene)


def test_no_batch_is_larger_than_allowed_and_a_larger_request_is_worked_on_in_parts() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100)
        nine = [str(i) for i in range(9)]
        assert await batches.submit(nine, 1, None) == nine
        assert [len(queries) for queries, _, _ in work.calls] == [4, 4, 1]

    play(scene)


def test_a_full_queue_refuses_at_once_and_takes_again_when_there_is_room() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        waiting = asyncio.ensure_future(batches.submit(["a"] * 5, 1, None))
        await until(lambda: batches.depth == 5)
        with pytest.raises(QueueFullError) as full:
            await batches.submit(["b", "c"], 1, None)
        assert full.value.retry_after >= 1
        last = asyncio.ensure_future(batches.submit(["d"], 1, None))
        work.go.set()
        assert (await held, await waiting, await last) == (["HELD"], ["A"] * 5, ["D"])
        assert await batches.submit(["b", "c"], 1, None) == ["B", "C"]

    play(scene)


def test_a_request_past_its_deadline_is_given_up_and_never_worked_on() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, deadline=0.05)
        held = await hold(work, batches)
        with pytest.raises(DeadlineError):
            await batches.submit(["late"], 1, None)
        assert batches.depth == 0
        with pytest.raises(DeadlineError):
            await held
        work.go.set()
        await batches.close()
        assert [queries for queries, _, _ in work.calls] == [["held"]]

    play(scene)


def test_a_cancelled_request_leaves_the_queue_at_once_and_is_never_worked_on() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        leaving = asyncio.ensure_future(batches.submit(["gone"] * 6, 1, None))
        await until(lambda: batches.depth == 6)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert batches.depth == 0
        work.go.set()
        assert await held == ["HELD"]
        assert await batches.submit(["next"], 1, None) == ["NEXT"]
        assert ["gone"] * 4 not in [queries for queries, _, _ in work.calls]

    play(scene)


def test_the_rest_of_a_long_request_is_left_when_no_one_waits_for_it() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100)
        work.go.clear()
        leaving = asyncio.ensure_future(batches.submit(["x"] * 40, 1, None))
        await until(lambda: len(work.calls) == 1)
        leaving.cancel()
        await asyncio.wait({leaving})
        work.go.set()
        await batches.close()
        assert len(work.calls) == 1

    play(scene)


def test_a_failure_reaches_every_request_of_the_batch_and_no_other() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        tasks = [asyncio.ensure_future(batches.submit([text], 1, None)) for text in ("fail", "beside")]
        await until(lambda: batches.depth == 2)
        work.go.set()
        assert await held == ["HELD"]
        for task in tasks:
            with pytest.raises(RuntimeError, match="no such luck"):
                await task
        assert await batches.submit(["after"], 1, None) == ["AFTER"]

    play(scene)


def test_closing_answers_what_is_in_flight_and_takes_nothing_more() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        waiting = asyncio.ensure_future(batches.submit(["waiting"], 1, None))
        await until(lambda: batches.depth == 1)
        closing = asyncio.ensure_future(batches.close())
        await until(lambda: batches.closed)
        with pytest.raises(ClosedError):
            await batches.submit(["new"], 1, None)
        work.go.set()
        assert (await held, await waiting) == (["HELD"], ["WAITING"])
        await closing

    play(scene)


def test_batches_and_waits_are_reported() -> None:
    async def scene() -> None:
        seen: list[tuple[int, list[float]]] = []
        work = Work()
        batches = batcher(work, on_batch=lambda size, waits: seen.append((size, waits)))
        await asyncio.gather(batches.submit(["a", "b"], 1, None), batches.submit(["c"], 1, None))
        assert [(size, len(waits)) for size, waits in seen] == [(3, 2)]
        assert all(wait >= 0 for _, waits in seen for wait in waits)

    play(scene)
