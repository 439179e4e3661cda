"""The threads of calls that change and explain."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from export.bundle.read import open_bundle
from service.admin import _MOST_WAITING, _WORKERS, Phrases
from service.engine import EngineSettings
from service.problems import ProblemError
from service.serving import Serving


@pytest.fixture
def phrases(tiny_bundle: Path):
    serving = Serving(open_bundle(tiny_bundle), EngineSettings(), store=None, cache_bytes=0, probes=0)
    phrases = Phrases(serving, None)
    yield phrases
    phrases.close()


def test_work_is_not_done_on_the_loop(phrases: Phrases) -> None:
    async def run() -> None:
        assert await phrases.off_loop(threading.get_ident) != threading.get_ident()

    asyncio.run(run())


def test_more_than_can_wait_is_refused_at_once(phrases: Phrases) -> None:
    go = threading.Event()

    async def run() -> None:
        calls = [
            asyncio.create_task(phrases.off_loop(lambda: go.wait(20)))
            for _ in range(_WORKERS + _MOST_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ProblemError) as refused:
            await phrases.off_loop(lambda: None)
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
        # Who leaves takes no work with them that is done already.
        calls[0].cancel()
        await asyncio.sleep(0)
        with pytest.raises(ProblemError):
            await phrases.off_loop(lambda: None)
        go.set()
        assert await asyncio.gather(*calls[1:]) == [True] * (len(calls) - 1)
        assert await phrases.off_loop(lambda: 7) == 7

    asyncio.run(run())


def test_what_fails_when_nobody_waits_is_not_told(phrases: Phrases, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    def fail() -> None:
        go.wait(20)
        raise ValueError("late")

    async def run() -> None:
        call = asyncio.create_task(phrases.off_loop(fail))
        await asyncio.sleep(0)
        call.cancel()
        go.set()
        await phrases.off_loop(lambda: None)
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert caplog.text == ""
