from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from service.batcher import Batcher, ClosedError, DeadlineError, Job, Pace, QueueFullError

Call = tuple[list[str], list[int]]


class Work:
    """Work that can be held up: answers each query with its upper case, and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, queries: list[str], options: list[int]) -> list[str]:
        self.calls.append((queries, options))
        assert self.go.wait(10)
        if "fail" in queries:
            raise RuntimeError("no such luck")
        return [query.upper() for query in queries]

    @property
    def sizes(self) -> list[int]:
        return [len(queries) for queries, _ in self.calls]


def batcher(work: Callable[..., Any], **changed: Any) -> Batcher[int, str]:
    defaults: dict[str, Any] = {"threads": 1, "batch": lambda: 4, "queue": 6, "queue_bytes": 1000}
    return Batcher(work, **(defaults | changed))


async def ask(batches: Batcher[int, str], queries: list[str], options: int = 0, within: float = 5.0) -> Any:
    return await batches.submit(queries, options, within).answer


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def hold(work: Work, batches: Batcher[int, str]) -> Job[int, str]:
    """Occupy the one thread until `work.go` is set."""
    work.go.clear()
    job = batches.submit(["held"], 1, 5.0)
    await until(lambda: len(work.calls) == 1)
    return job


def test_each_request_gets_its_own_answers_whatever_batch_it_was_in() -> None:
    def answer(queries: list[str], options: list[int]) -> list[str]:
        return [f"{query} {option}" for query, option in zip(queries, options, strict=True)]

    async def scene() -> None:
        batches = batcher(answer, threads=2, queue=1000, queue_bytes=10_000)
        asked = [[f"q{i}-{j}" for j in range(1 + i % 9)] for i in range(100)]
        answers = await asyncio.gather(*(ask(batches, one, i % 3) for i, one in enumerate(asked)))
        assert answers == [[f"{query} {i % 3}" for query in one] for i, one in enumerate(asked)]
        assert batches.depth == 0

    play(scene)


def test_alone_a_request_waits_for_no_other() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        for query in "abc":
            assert await ask(batches, [query]) == [query.upper()]
        assert work.sizes == [1, 1, 1]

    play(scene)


def test_waiting_requests_join_one_batch_in_order_of_arrival_each_with_its_options() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        jobs = [
            batches.submit(queries, k, 5.0)
            for queries, k in [(["a"], 5), (["b"], 9), (["c", "d"], 5), (["e"], 7)]
        ]
        assert batches.depth == 5
        work.go.set()
        await asyncio.gather(held.answer, *(job.answer for job in jobs))
        assert work.calls[1:] == [(["a", "b", "c", "d"], [5, 9, 5, 5]), (["e"], [7])]

    play(scene)


def test_no_batch_is_larger_than_allowed_and_a_larger_request_is_worked_on_in_parts() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100)
        nine = [str(i) for i in range(9)]
        assert await ask(batches, nine) == nine
        assert work.sizes == [4, 4, 1]

    play(scene)


def test_the_size_of_a_batch_is_asked_anew_for_each() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100, batch=lambda: 1 + len(work.calls))
        held = await hold(work, batches)
        nine = batches.submit([str(i) for i in range(9)], 1, 5.0)
        work.go.set()
        await asyncio.gather(held.answer, nine.answer)
        assert work.sizes == [1, 2, 3, 4]

    play(scene)


def test_what_waits_is_shared_out_among_the_threads_that_are_free() -> None:
    async def scene() -> None:
        work = Work()
        work.go.clear()
        batches = batcher(work, threads=4, queue=100, batch=lambda: 100)
        await until(lambda: len(batches._idle) == 4)
        eight = batches.submit([str(i) for i in range(8)], 1, 5.0)
        await until(lambda: len(work.calls) == 4)
        assert work.sizes == [2, 2, 2, 2]
        work.go.set()
        assert await eight.answer == [str(i) for i in range(8)]

    play(scene)


def test_threads_that_are_at_work_get_no_share_while_others_are_free() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, threads=3, queue=100, batch=lambda: 100)
        await until(lambda: len(batches._idle) == 3)
        held = await hold(work, batches)
        six = batches.submit([str(i) for i in range(6)], 1, 5.0)
        await until(lambda: len(work.calls) == 3)
        assert work.sizes == [1, 3, 3]
        work.go.set()
        await asyncio.gather(held.answer, six.answer)

    play(scene)


def test_threads_that_are_all_at_work_share_what_gathers_but_not_the_last_few() -> None:
    async def scene() -> None:
        work = Work()
        work.go.clear()
        batches = batcher(work, threads=2, queue=100, batch=lambda: 100)
        await until(lambda: len(batches._idle) == 2)
        held = []
        for name in "ab":
            held.append(batches.submit([name], 1, 5.0))
            await until(lambda: len(work.calls) == len(held))
        many = batches.submit([str(i) for i in range(20)], 1, 5.0)
        work.go.set()
        await asyncio.gather(*(one.answer for one in held), many.answer)
        assert work.sizes == [1, 1, 10, 5, 4, 1]

    play(scene)


def test_between_the_slices_of_a_large_request_others_have_their_turn() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100)
        held = await hold(work, batches)
        large = batches.submit([f"l{i}" for i in range(12)], 1, 5.0)
        small = [batches.submit([name], 2, 5.0) for name in "ab"]
        work.go.set()
        await asyncio.gather(held.answer, large.answer, *(job.answer for job in small))
        assert [queries for queries, _ in work.calls[1:]] == [
            ["l0", "l1", "l2", "l3"],
            ["a", "b", "l4", "l5"],
            ["l6", "l7", "l8", "l9"],
            ["l10", "l11"],
        ]
        assert large.answer.result() == [f"L{i}" for i in range(12)]

    play(scene)


def test_a_full_queue_refuses_at_once_and_takes_again_when_there_is_room() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        waiting = batches.submit(["a"] * 5, 1, 5.0)
        assert batches.depth == 5
        with pytest.raises(QueueFullError) as full:
            batches.submit(["b", "c"], 1, 5.0)
        assert full.value.retry_after >= 1
        last = batches.submit(["d"], 1, 5.0)
        work.go.set()
        answers = await asyncio.gather(held.answer, waiting.answer, last.answer)
        assert answers == [["HELD"], ["A"] * 5, ["D"]]
        assert await ask(batches, ["b", "c"]) == ["B", "C"]

    play(scene)


def test_the_queue_is_bounded_in_characters_too() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100, queue_bytes=10)
        held = await hold(work, batches)
        waiting = batches.submit(["abc", "def"], 1, 5.0)
        with pytest.raises(QueueFullError):
            batches.submit(["ghijk"], 1, 5.0)
        last = batches.submit(["lmno"], 1, 5.0)
        with pytest.raises(QueueFullError):
            batches.submit(["p"], 1, 5.0)
        # One that leaves makes room for as much as it had.
        last.answer.cancel()
        await until(lambda: batches.depth == 2)
        other = batches.submit(["qrst"], 1, 5.0)
        work.go.set()
        await asyncio.gather(held.answer, waiting.answer, other.answer)
        assert await ask(batches, ["0123456789"]) == ["0123456789"]
        assert batches._bytes == 0

    play(scene)


def test_what_nobody_waits_for_leaves_idle_threads_alone() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, threads=3)
        looks = []
        take = batches._take
        batches._take = lambda: (looks.append(None), take())[1]  # type: ignore[method-assign]
        await until(lambda: len(batches._idle) == 3)
        work.go.clear()
        held = []
        for name in "abc":
            held.append(batches.submit([name], 1, 5.0))
            await until(lambda: len(work.calls) == len(held))
        late = batches.submit(["d"], 1, 0.01)
        left = batches.submit(["e"], 1, 5.0)
        with pytest.raises(DeadlineError):
            await late.answer
        left.answer.cancel()
        await until(lambda: batches.depth == 0)
        work.go.set()
        await asyncio.gather(*(one.answer for one in held))
        await until(lambda: len(batches._idle) == 3)
        seen = len(looks)
        await asyncio.sleep(0.05)
        assert len(looks) == seen
        assert not batches._waiting
        assert await ask(batches, ["f"]) == ["F"]

    play(scene)


def test_what_would_end_a_thread_is_an_error_of_its_batch_alone() -> None:
    class Panic(BaseException):
        pass

    def work(queries: list[str], _options: list[int]) -> list[str]:
        if "panic" in queries:
            raise Panic("native code gave up")
        return queries

    async def scene() -> None:
        batches = batcher(work)
        with pytest.raises(RuntimeError, match="native code gave up"):
            await ask(batches, ["panic"])
        assert await ask(batches, ["a"]) == ["a"]
        await batches.close()

    play(scene)


def test_options_take_room_in_the_queue_too_and_one_that_is_larger_than_it_is_taken_alone() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue_bytes=100, size_of=lambda queries, options: len(queries) + options)
        held = await hold(work, batches)
        large = batches.submit(["a"], 1000, 5.0)
        with pytest.raises(QueueFullError):
            batches.submit(["b"], 1, 5.0)
        work.go.set()
        await asyncio.gather(held.answer, large.answer)
        assert batches._bytes == 0

    play(scene)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_client_is_told_to_come_back_when_what_waits_is_likely_to_be_done(threads: int) -> None:
    def slow(queries: list[str], _options: list[int]) -> list[str]:
        if queries == ["slow"]:
            time.sleep(0.4)
        assert go.wait(10)
        return queries

    async def scene() -> None:
        batches = batcher(slow, threads=threads, queue=500, queue_bytes=10_000)
        await ask(batches, ["slow"])
        assert batches.retry_after() == 1
        go.clear()
        held = [batches.submit(["held"], 1, 15.0) for _ in range(threads)]
        await until(lambda: batches.depth == 0)
        waiting = batches.submit(["x"] * 500, 1, 15.0)
        with pytest.raises(QueueFullError) as full:
            batches.submit(["y"], 1, 5.0)
        # A tenth of the 0.4 seconds a query, by what is measured; there are 500, and so many threads.
        assert full.value.retry_after >= 20 / threads - 1
        go.set()
        await asyncio.gather(waiting.answer, *(job.answer for job in held))
        assert batches.retry_after() == 1

    go = threading.Event()
    go.set()
    play(scene)


def test_who_would_wait_most_of_its_time_is_refused_at_once() -> None:
    def slow(queries: list[str], _options: list[int]) -> list[str]:
        if queries == ["slow"]:
            time.sleep(0.4)
        assert go.wait(10)
        return queries

    async def scene() -> None:
        batches = batcher(slow, queue=500, queue_bytes=10_000)
        await ask(batches, ["slow"])
        go.clear()
        held = batches.submit(["held"], 1, 30.0)
        await until(lambda: batches.depth == 0)
        # Nobody waits, so whatever was measured tells nothing against the first.
        first = batches.submit(["x"] * 100, 1, 3.0)
        # 0.04 seconds a query at least, a tenth of what was measured: there are some 4 to wait for.
        with pytest.raises(QueueFullError) as full:
            batches.submit(["hurried"], 1, 3.0)
        assert full.value.retry_after >= 4
        patient = batches.submit(["patient"], 1, 1000.0)
        go.set()
        await asyncio.gather(held.answer, first.answer, patient.answer)
        # Idle again, it takes who is in a hurry.
        assert await ask(batches, ["hurried"], within=3.0) == ["hurried"]

    go = threading.Event()
    go.set()
    play(scene)


def test_a_request_past_its_deadline_is_given_up_and_never_worked_on() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        work.go.clear()
        held = batches.submit(["held"], 1, 0.05)
        await until(lambda: len(work.calls) == 1)
        patient = batches.submit(["patient"], 1, 10.0)
        with pytest.raises(DeadlineError):
            await ask(batches, ["late"], within=0.05)
        assert batches.depth == 1
        with pytest.raises(DeadlineError):
            await held.answer
        work.go.set()
        assert await patient.answer == ["PATIENT"]
        await batches.close()
        assert [queries for queries, _ in work.calls] == [["held"], ["patient"]]

    play(scene)


def test_late_work_is_not_begun_even_where_the_event_loop_has_not_noticed() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        late = batches.submit(["late"], 1, 0.02)
        in_time = batches.submit(["in time"], 1, 10.0)
        # The loop stands still; the pool's threads do not.
        time.sleep(0.05)
        work.go.set()
        for _ in range(1000):
            if batches.depth == 0:
                break
            time.sleep(0.005)
        with pytest.raises(DeadlineError):
            await late.answer
        assert (await held.answer, await in_time.answer) == (["HELD"], ["IN TIME"])
        assert [queries for queries, _ in work.calls] == [["held"], ["in time"]]
        assert (batches.depth, batches._bytes) == (0, 0)

    play(scene)


def test_a_client_that_leaves_makes_room_at_once_and_is_never_worked_on() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        leaving = batches.submit(["gone"] * 6, 1, 5.0)
        assert batches.depth == 6
        leaving.answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving.answer
        await asyncio.sleep(0)
        assert batches.depth == 0
        stays = batches.submit(["next"] * 6, 1, 5.0)
        work.go.set()
        assert await held.answer == ["HELD"]
        assert await stays.answer == ["NEXT"] * 6
        assert not any("gone" in queries for queries, _ in work.calls)

    play(scene)


def test_the_rest_of_a_long_request_is_left_when_no_one_waits_for_it() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100)
        work.go.clear()
        leaving = batches.submit(["x"] * 40, 1, 5.0)
        await until(lambda: len(work.calls) == 1)
        leaving.answer.cancel()
        await asyncio.wait({leaving.answer})
        work.go.set()
        await batches.close()
        assert len(work.calls) == 1
        assert (batches.depth, batches._bytes) == (0, 0)

    play(scene)


def test_a_failure_reaches_every_request_of_the_batch_and_no_other() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        jobs = [batches.submit([text], 1, 5.0) for text in ("fail", "beside")]
        work.go.set()
        assert await held.answer == ["HELD"]
        for job in jobs:
            with pytest.raises(RuntimeError, match="no such luck"):
                await job.answer
        assert await ask(batches, ["after"]) == ["AFTER"]

    play(scene)


def test_after_a_failure_the_rest_of_the_request_is_left() -> None:
    def work(queries: list[str], _options: list[int]) -> list[str]:
        sizes.append(len(queries))
        if "fail" in queries:
            raise RuntimeError("no such luck")
        assert go.wait(10)
        return queries

    async def scene() -> None:
        batches = batcher(work, queue=100)
        long = batches.submit(["fail", *"abcdefghijk"], 1, 5.0)
        with pytest.raises(RuntimeError, match="no such luck"):
            await long.answer
        await until(lambda: batches.depth == 0)
        go.set()
        await batches.close()
        # A second slice may have been begun before the loop had heard of the first.
        assert sizes in ([4], [4, 4])

    sizes: list[int] = []
    go = threading.Event()
    play(scene)


def test_closing_answers_what_is_in_flight_and_takes_nothing_more() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work)
        held = await hold(work, batches)
        waiting = batches.submit(["waiting"] * 6, 1, 5.0)
        closing = asyncio.ensure_future(batches.close())
        await until(lambda: batches.closed)
        with pytest.raises(ClosedError):
            batches.submit(["new"], 1, 5.0)
        assert not closing.done()
        work.go.set()
        await closing
        assert (await held.answer, await waiting.answer) == (["HELD"], ["WAITING"] * 6)
        assert not any(thread.is_alive() for thread in batches._pool)

    play(scene)


def test_batches_and_waits_are_reported() -> None:
    async def scene() -> None:
        seen: list[tuple[int, list[float]]] = []
        work = Work()
        batches = batcher(
            work, queue=100, on_batch=lambda waits, options, _: seen.append((len(options), waits))
        )
        held = await hold(work, batches)
        jobs = [batches.submit(queries, 1, 5.0) for queries in (["a", "b"], list("cdefg"))]
        await asyncio.sleep(0.02)
        work.go.set()
        await asyncio.gather(held.answer, *(job.answer for job in jobs))
        # After the answers are on their way.
        await until(lambda: len(seen) == 3)
        # A request waited until its first slice was begun.
        assert [(size, len(waits)) for size, waits in seen] == [(1, 1), (4, 2), (3, 0)]
        assert all(wait >= 0.02 for wait in seen[1][1])

    play(scene)


def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    async def scene() -> None:
        work = Work()
        batches = batcher(work, queue=100)
        held = await hold(work, batches)
        batches._pace.query_seconds = 0.01
        waiting = batches.submit(list("abcdefghi"), 1, 5.0)
        # One in work and nine ahead, 10 ms each: 0.1 seconds.
        with pytest.raises(QueueFullError):
            batches.submit(["j"], 1, 0.12)
        patient = batches.submit(["j"], 1, 0.5)
        work.go.set()
        await asyncio.gather(held.answer, waiting.answer, patient.answer)
        # With nothing ahead of it a request is taken, whatever it may take itself.
        batches._pace.query_seconds = 10.0
        assert await batches.submit(["k"], 1, 0.5).answer == ["K"]

    play(scene)


def test_many_threads_and_requests_that_come_leave_and_are_late() -> None:
    chance = random.Random(3)
    lock = threading.Lock()
    worked_on: Counter[str] = Counter()
    sizes: list[int] = []
    at_once: list[int] = []
    working = 0

    def work(queries: list[str], options: list[int]) -> list[str]:
        nonlocal working
        with lock:
            working += 1
            at_once.append(working)
            worked_on.update(queries)
            sizes.append(len(queries))
        time.sleep(0.0005)
        with lock:
            working -= 1
        return [f"{query} {option}" for query, option in zip(queries, options, strict=True)]

    async def scene() -> None:
        batches: Batcher[int, str] = Batcher(work, threads=8, batch=lambda: 5, queue=300, queue_bytes=2000)
        outcomes: Counter[str] = Counter()
        left: set[str] = set()

        async def client(number: int) -> None:
            for turn in range(40):
                queries = [f"{number}-{turn}-{i}" for i in range(chance.choice((1, 1, 1, 2, 30)))]
                within = chance.choice((5.0, 5.0, 0.003))
                try:
                    job = batches.submit(queries, turn, within)
                except QueueFullError:
                    outcomes["refused"] += 1
                    left.update(queries)
                    await asyncio.sleep(0.001)
                    continue
                assert batches.depth <= 300
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.choice((0, 0.001)))
                    job.answer.cancel()
                try:
                    answers = await job.answer
                except DeadlineError:
                    assert within < 1
                    outcomes["late"] += 1
                except asyncio.CancelledError:
                    outcomes["left"] += 1
                else:
                    assert answers == [f"{query} {turn}" for query in queries]
                    assert all(worked_on[query] == 1 for query in queries)
                    outcomes["answered"] += 1

        await asyncio.gather(*(client(number) for number in range(60)))
        assert (batches.depth, batches._bytes) == (0, 0)
        await batches.close()
        assert sum(outcomes.values()) == 60 * 40
        # Few are late: who is likely to be is refused.
        assert min(outcomes[one] for one in ("answered", "refused", "left")) > 10
        assert max(worked_on.values()) == 1
        assert not left & set(worked_on)

    play(scene)
    assert max(sizes) <= 5
    assert 1 < max(at_once) <= 8


def test_a_machine_that_stood_still_once_does_not_make_the_next_batches_seem_slow() -> None:
    pace = Pace(2)
    for _ in range(40):
        pace.add(8, 0.016)
    pace.add(8, 30.0)
    pace.add(1, 30.0)
    assert pace.query_seconds == pytest.approx(0.002)
    for _ in range(40):
        pace.add(4, 0.4)
    assert pace.query_seconds == pytest.approx(0.1)


def test_the_pace_counts_slow_batches_among_quick_ones() -> None:
    pace = Pace(2)
    for turn in range(200):
        pace.add(10, 1.0 if turn % 3 == 0 else 0.01)
    assert 0.02 < pace.query_seconds < 0.04
