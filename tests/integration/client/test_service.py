"""Both clients against the real service."""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bidmatch import client as api

Connect = Callable[..., Any]


def test_one_query(connect: Connect, server: Any) -> None:
    answer = connect(server.url, timeout=20).match(" RED running shoes", k=3)
    raw = httpx.post(f"{server.url}/match", json={"query": " RED running shoes", "k": 3}).json()
    assert answer.bundle == raw["bundle"]
    assert [match.source for match in answer.matches] == ["exact", "exact", "index"]
    assert {match.id for match in answer.matches[:2]} == {"p0", "p1"}
    for match, one in zip(answer.matches, raw["matches"], strict=True):
        assert (match.id, match.phrase, match.score) == (one["id"], one["phrase"], one["score"])
        assert {"encoder": match.encoder, "classifier": match.classifier} == one["parts"]
        assert match.columns == one.get("columns", {})
        assert match.relevance is None


def test_several_queries(connect: Connect, server: Any) -> None:
    client = connect(server.url, timeout=20)
    queries = ["red running shoes", " ", "größe", "red running shoes"]
    answers = client.match_many(queries, k=2)
    assert [result.query for result in answers.results] == queries
    assert [len(result.matches) for result in answers.results] == [2, 0, 2, 2]
    assert answers.results[0].matches == client.match("red running shoes", k=2).matches


def test_min_score(connect: Connect, server: Any) -> None:
    client = connect(server.url, timeout=20)
    scores = [match.score for match in client.match("cheap tent", k=20).matches]
    kept = client.match("cheap tent", k=20, min_score=scores[4]).matches
    assert [match.score for match in kept] == scores[:5]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"query": " "}, "body.query"),
        ({"query": "tent", "k": 0}, "body.k"),
        ({"query": "tent", "min_score": 7.0}, "body.min_score"),
        ({"query": "tent", "min_relevance": 0.5}, "body.min_relevance"),
        ({"query": "tent", "filter": {"colour": "red"}}, "body.filter.colour"),
        ({"query": "tent", "deny": [""]}, "body.deny.0"),
        ({"query": "tent", "deadline_ms": 15_000}, "header.X-Request-Timeout-Ms"),
    ],
)
def test_what_it_refuses(connect: Connect, server: Any, arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(api.InvalidRequest) as caught:
        connect(server.url, timeout=20).match(**arguments)
    error = caught.value
    assert (error.status, error.kind) == (422, "invalid-request")
    assert [one.where for one in error.errors] == [where]
    assert where in str(error)


def test_bodies_that_are_too_large(connect: Connect, server: Any) -> None:
    with pytest.raises(api.InvalidRequest) as caught:
        connect(server.url, timeout=20).match("red shoes " * 500_000)
    assert caught.value.status == 413


def test_probes_and_metrics(connect: Connect, server: Any) -> None:
    client = connect(server.url, timeout=20)
    assert client.healthy() is True
    assert client.ready() is True
    assert "\nbidmatch_queue_depth" in client.metrics()


def test_connections_are_kept(connect: Connect, start: Callable) -> None:
    with start("--access-log") as server:
        client = connect(server.url, timeout=20)
        for _ in range(5):
            client.match("tent")
        server.stop()
        lines = [line for line in server.said if "route=/match" in line]
        ports = {port for line in lines for port in re.findall(r" client=\S+:(\d+)", line)}
    assert (len(lines), len(ports)) == (5, 1), server.text()


def test_a_deadline_that_passed(connect: Connect, start: Callable) -> None:
    with start("--threads", "1", "--deadline-ms", "1") as server:
        with pytest.raises(api.DeadlineExceeded) as caught:
            connect(server.url, timeout=20).match_many(["red running shoes"] * 256, k=100)
        assert (caught.value.status, caught.value.kind) == (504, "deadline")


def test_more_than_the_queue_holds(start: Callable) -> None:
    """What is turned away is answered where it may be sent again."""

    async def ask(url: str, retries: int) -> collections.Counter[type]:
        async with api.AsyncClient(url, timeout=60, retries=retries, max_wait=0.1) as client:
            calls = (client.match_many(["cheap red tent"] * 8, k=300) for _ in range(24))
            return collections.Counter(map(type, await asyncio.gather(*calls, return_exceptions=True)))

    with start("--threads=1", "--queue=8", "--max-queries=8", "--deadline-ms=10000") as server:
        once = asyncio.run(ask(server.url, 0))
        assert set(once) == {api.Answers, api.QueueFull}
        assert asyncio.run(ask(server.url, 500)) == {api.Answers: 24}


def test_a_service_that_stops_and_comes_back(connect: Connect, start: Callable) -> None:
    with start() as server:
        client = connect(server.url, timeout=20, retries=1)
        bundle = client.match("tent").bundle
        port = str(server.address[1])
        assert server.stop() == 0
        with pytest.raises(api.ConnectionFailed):
            client.match("tent")
        assert client.ready() is False
    with start("--port", port):
        assert client.match("tent").bundle == bundle
