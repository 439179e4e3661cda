"""Connections and what comes over them."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bidmatch import __version__
from bidmatch import client as api

Connect = Callable[..., Any]


def test_one_connection_serves_all_calls(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.reply(), steps.problem(422, "invalid-request"), steps.reply())
    client = connect(server.url)
    client.match("red tent")
    with pytest.raises(api.InvalidRequest):
        client.match("red tent")
    client.match("red tent")
    assert server.connections == 1


def test_a_connection_that_the_server_closed_meanwhile(
    connect: Connect, scripted: Callable, steps: Any
) -> None:
    closed = steps.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\n" + steps.ANSWER)
    server = scripted(closed)
    client = connect(server.url, timeout=20)
    for _ in range(5):
        assert client.match("red tent").bundle == "b1"
    assert server.connections >= 5


def test_a_late_answer_is_not_taken_for_the_next_one(
    connect: Connect, scripted: Callable, steps: Any
) -> None:
    late = steps.slow(0.4, steps.reply(body=b'{"matches":[],"bundle":"late"}'))
    server = scripted(late, steps.reply())
    client = connect(server.url)
    with pytest.raises(api.DeadlineExceeded):
        client.match("red tent", timeout=0.1)
    assert client.match("red tent", timeout=20).bundle == "b1"


def test_threads_share_a_client(scripted: Callable, steps: Any) -> None:
    server = scripted(steps.slow(0.002, steps.reply()))
    with api.Client(server.url, timeout=30, connections=4) as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: client.match(f"query {i}"), range(200)))
    assert {answer.bundle for answer in answers} == {"b1"}
    assert sorted(seen.json["query"] for seen in server.seen) == sorted(f"query {i}" for i in range(200))
    assert server.connections <= 4


def test_tasks_share_a_client(scripted: Callable, steps: Any) -> None:
    server = scripted(steps.slow(0.002, steps.reply()))

    async def ask() -> list[api.Answer]:
        async with api.AsyncClient(server.url, timeout=30, connections=4) as client:
            return await asyncio.gather(*(client.match(f"query {i}") for i in range(200)))

    assert {answer.bundle for answer in asyncio.run(ask())} == {"b1"}
    assert sorted(seen.json["query"] for seen in server.seen) == sorted(f"query {i}" for i in range(200))
    assert server.connections <= 4


def test_waiting_for_a_connection_is_part_of_the_time(scripted: Callable, steps: Any) -> None:
    server = scripted(steps.stall)
    with api.Client(server.url, connections=1) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.match, "first", timeout=3)
        while not server.seen:
            time.sleep(0.01)
        with pytest.raises(api.DeadlineExceeded):
            client.match("second", timeout=0.2)
        assert not first.done()
        with pytest.raises(api.DeadlineExceeded):
            first.result()
    assert [seen.json["query"] for seen in server.seen] == ["first"]


def test_a_cancelled_call_closes_its_connection(scripted: Callable, steps: Any) -> None:
    server = scripted(steps.stall, steps.reply())

    async def ask() -> api.Answer:
        async with api.AsyncClient(server.url, timeout=60) as client:
            call = asyncio.create_task(client.match("red tent"))
            while not server.seen:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(server.left.wait, 20)
            return await client.match("red tent")

    assert asyncio.run(ask()).bundle == "b1"


def test_a_callers_own_timeout_stays_one(scripted: Callable, steps: Any) -> None:
    server = scripted(steps.stall)

    async def ask() -> None:
        async with api.AsyncClient(server.url, timeout=60) as client, asyncio.timeout(0.2):
            await client.match("red tent")

    with pytest.raises(TimeoutError):
        asyncio.run(ask())


def test_headers(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.reply())
    client = connect(server.url, api_key="secret-key")
    client.match("red tent")
    client.metrics()
    posted, got = server.seen
    assert posted.headers["authorization"] == got.headers["authorization"] == "Bearer secret-key"
    assert posted.headers["content-type"] == "application/json"
    assert "content-type" not in got.headers
    assert posted.headers["user-agent"] == f"bidmatch-client/{__version__}"


def test_without_a_key_none_is_sent(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.reply())
    connect(server.url).match("red tent")
    assert "authorization" not in server.seen[0].headers


def test_a_service_below_a_path(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.reply())
    for end in ("", "/"):
        connect(f"{server.url}/ads/matcher{end}").match("red tent")
    assert [seen.path for seen in server.seen] == ["/ads/matcher/match"] * 2


MATCH = {
    "id": "p1",
    "phrase": "red tent",
    "score": 1.5,
    "parts": {"encoder": 1, "classifier": 0.5},
    "source": "live",
    "relevance": 0.25,
    "columns": {"match_type": "exact"},
}


def test_fields_of_newer_services_are_passed_over(connect: Connect, scripted: Callable, steps: Any) -> None:
    newer = MATCH | {"colour": "red", "source": "oracle", "parts": {**MATCH["parts"], "third": 0}}  # type: ignore[dict-item]
    server = scripted(
        steps.reply(body=json.dumps({"matches": [newer], "bundle": "b", "took": {"ms": 1}}).encode())
    )
    answer = connect(server.url).match("red tent")
    assert answer == api.Answer(
        (api.Match("p1", "red tent", 1.5, 1.0, 0.5, "oracle", 0.25, {"match_type": "exact"}),), "b"
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "is not JSON"),
        (b'{"matches": [', "is not JSON"),
        (b"<html>welcome</html>", "is not JSON"),
        (b'{"matches": []}', "bundle is missing"),
        (b"[]", "is not an object"),
        (
            json.dumps({"matches": [MATCH, {"id": "p2"}], "bundle": "b"}).encode(),
            "matches[1].parts is missing",
        ),
    ],
)
def test_an_answer_that_is_none(
    connect: Connect, scripted: Callable, steps: Any, body: bytes, said: str
) -> None:
    server = scripted(steps.reply(body=body))
    with pytest.raises(api.ProtocolError) as caught:
        connect(server.url).match("red tent")
    assert str(caught.value).startswith("200 protocol: the answer to POST /match")
    assert said in str(caught.value)
    assert len(server.seen) == 1


def test_a_compressed_answer(connect: Connect, scripted: Callable, steps: Any) -> None:
    whole = gzip.compress(steps.ANSWER)
    server = scripted(
        steps.reply(body=whole, content_encoding="gzip"),
        steps.reply(body=b"not gzip", content_encoding="gzip"),
    )
    client = connect(server.url)
    assert client.match("red tent").bundle == "b1"
    with pytest.raises(api.ProtocolError, match="cannot be decoded"):
        client.match("red tent")


def test_what_is_no_http(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.raw(b"220 mail.example ESMTP\r\n"))
    with pytest.raises(api.ConnectionFailed):
        connect(server.url, retries=0).match("red tent")


def test_a_proxys_error(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.reply(503, b"<html>no upstream</html>"), steps.reply(302, b"", location="/login"))
    client = connect(server.url)
    with pytest.raises(api.Unavailable) as caught:
        client.match("red tent")
    assert caught.value.kind == "service-unavailable"
    with pytest.raises(api.ServiceError) as caught:
        client.match("red tent")
    assert (caught.value.status, caught.value.kind) == (302, "found")
    assert len(server.seen) == 2


def test_a_closed_client(scripted: Callable, steps: Any) -> None:
    server = scripted(steps.reply())
    client = api.Client(server.url)
    client.match("red tent")
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.match("red tent")
