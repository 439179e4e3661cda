"""What is sent again, when, and how long a call may take: against a server that does as it is told."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from bidmatch import client as api

Connect = Callable[..., Any]

CALLS: dict[str, tuple[Any, ...]] = {
    "match": ("red tent",),
    "match_many": (["red tent"],),
    "put_phrases": ([api.NewPhrase("p", "red tent")],),
    "get_phrase": ("p",),
    "pause": ("p",),
    "resume": ("p",),
    "remove": ("p",),
    "explain": ("red tent",),
    "metrics": (),
}
PHRASE = (
    b'{"id":"p","text":"red tent","columns":{},"state":"active","source":"live",'
    b'"changed":"2024-05-01T10:00:00Z"}'
)
EXPLANATION = (
    b'{"query":"red tent","tokens":[],"words":[],"ef":1,"depth":1,"admitted":1,"searched":"graph",'
    b'"rescored":false,"candidates":[],"missing":[],"bundle":"b1"}'
)
BODIES = {
    "explain": EXPLANATION,
    "match_many": b'{"results":[{"query":"red tent","matches":[]}],"bundle":"b1"}',
    "put_phrases": b'{"phrases":[' + PHRASE + b"]}",
    **dict.fromkeys(("get_phrase", "pause", "resume", "remove"), PHRASE),
}


def test_a_full_queue_is_asked_again(connect: Connect, scripted: Callable, steps: Any) -> None:
    full = steps.problem(429, "queue-full", retry_after="0")
    server = scripted(full, full, steps.reply())
    assert connect(server.url, timeout=20).match("red tent", k=3).bundle == "b1"
    assert [seen.json for seen in server.seen] == [{"query": "red tent", "k": 3}] * 3


def test_not_before_the_time_it_asks_for(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.problem(429, "queue-full", retry_after="1"), steps.reply())
    connect(server.url, timeout=20).match("red tent")
    first, second = server.seen
    assert second.at - first.at >= 1


def test_a_queue_that_stays_full(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.problem(429, "queue-full", retry_after="0"))
    with pytest.raises(api.QueueFull) as caught:
        connect(server.url, timeout=20, retries=3).match("red tent")
    assert len(server.seen) == 4
    error = caught.value
    assert (error.status, error.kind, error.detail) == (429, "queue-full", "because of queue-full")
    assert error.retry_after == 0
    assert str(error) == "429 queue-full: because of queue-full"


def test_a_wait_beyond_the_time_of_the_call_is_not_begun(
    connect: Connect, scripted: Callable, steps: Any
) -> None:
    server = scripted(steps.problem(429, "queue-full", retry_after="60"), steps.reply())
    with pytest.raises(api.QueueFull) as caught:
        connect(server.url, timeout=20, max_wait=60).match("red tent")
    assert caught.value.retry_after == 60
    with pytest.raises(api.QueueFull):
        server.script.insert(0, steps.problem(429, "queue-full", retry_after="60"))
        connect(server.url, timeout=100, max_wait=100).match("red tent", deadline_ms=500)
    assert len(server.seen) == 2


def test_the_longest_wait_is_the_callers(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.problem(429, "queue-full", retry_after="3600"), steps.reply())
    assert connect(server.url, timeout=20, max_wait=0.01).match("red tent").bundle == "b1"


@pytest.mark.parametrize("name", CALLS)
def test_a_worker_that_stops(connect: Connect, scripted: Callable, steps: Any, name: str) -> None:
    stopping = steps.problem(503, "stopping")
    server = scripted(stopping, steps.reply(body=BODIES.get(name, steps.ANSWER)))
    getattr(connect(server.url, timeout=20), name)(*CALLS[name])
    assert len(server.seen) == 2


def test_a_change_that_was_not_stored(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.problem(503, "not-stored", retry_after="1"), steps.reply(body=PHRASE))
    assert connect(server.url, timeout=20).pause("p").id == "p"
    first, second = server.seen
    assert second.at - first.at >= 1
    server.script.insert(0, steps.problem(503, "not-stored", retry_after="0"))
    with pytest.raises(api.Unavailable):
        connect(server.url).reload()
    assert len(server.seen) == 3


@pytest.mark.parametrize("name", CALLS)
def test_a_connection_that_breaks_before_the_answer(
    connect: Connect, scripted: Callable, steps: Any, name: str
) -> None:
    server = scripted(steps.drop, steps.drop, steps.reply(body=BODIES.get(name, steps.ANSWER)))
    getattr(connect(server.url, timeout=20), name)(*CALLS[name])
    first, *others = server.seen
    assert len(others) == 2
    for other in others:
        assert (other.method, other.path, other.body) == (first.method, first.path, first.body)


def test_a_reload_is_not_sent_twice(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.drop)
    with pytest.raises(api.ConnectionFailed):
        connect(server.url).reload("/bundles/b")
    assert len(server.seen) == 1


def test_a_reload_that_was_not_begun_is_sent_again(connect: Connect, scripted: Callable, steps: Any) -> None:
    done = b'{"bundle":"b2","previous":"b1","phrases":3,"live_phrases":0,"agreement":null,"seconds":1}'
    server = scripted(steps.problem(503, "stopping"), steps.reply(body=done))
    assert connect(server.url).reload() == api.Reload("b2", "b1", 3, 0, None, 1.0)
    assert [seen.json for seen in server.seen] == [{}, {}]


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (400, api.InvalidRequest),
        (401, api.Unauthorized),
        (403, api.Unauthorized),
        (404, api.NotFound),
        (408, api.InvalidRequest),
        (409, api.Conflict),
        (413, api.InvalidRequest),
        (415, api.InvalidRequest),
        (422, api.InvalidRequest),
        (500, api.ServiceError),
        (502, api.ServiceError),
        (503, api.Unavailable),
        (504, api.DeadlineExceeded),
    ],
)
def test_what_is_never_sent_again(
    connect: Connect, scripted: Callable, steps: Any, status: int, raised: type[api.ServiceError]
) -> None:
    server = scripted(steps.problem(status, "some-reason"), steps.reply())
    with pytest.raises(api.ServiceError) as caught:
        connect(server.url, timeout=20).match("red tent")
    assert type(caught.value) is raised
    assert (caught.value.status, caught.value.kind) == (status, "some-reason")
    assert len(server.seen) == 1


def test_an_answer_that_breaks_off(connect: Connect, scripted: Callable, steps: Any) -> None:
    half = steps.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"matches":')
    server = scripted(half, steps.reply())
    with pytest.raises(api.ConnectionFailed, match="within the answer to POST /match at") as caught:
        connect(server.url, timeout=20).match("red tent")
    assert caught.value.status is None
    assert len(server.seen) == 1


def test_no_one_listens(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    client = connect(url, timeout=20, retries=1)
    with pytest.raises(api.ConnectionFailed, match=f"no connection for POST /match at {url}: "):
        client.match("red tent")
    assert client.healthy() is False
    assert client.ready() is False


@pytest.mark.parametrize("how", ["stall", "stall_within", "drip"])
def test_a_call_ends_when_its_time_is_over(
    connect: Connect, scripted: Callable, steps: Any, how: str
) -> None:
    server = scripted(getattr(steps, how))
    with pytest.raises(
        api.DeadlineExceeded, match=r"POST /match at http://.* was not answered within 0\.3 s"
    ) as caught:
        connect(server.url, timeout=0.3).match("red tent")
    assert caught.value.status is None
    assert server.left.wait(20)
    assert len(server.seen) == 1


@pytest.mark.parametrize("options", [{"timeout": 0.3}, {"deadline_ms": 300}])
def test_a_call_may_have_a_time_of_its_own(
    connect: Connect, scripted: Callable, steps: Any, options: dict
) -> None:
    server = scripted(steps.stall)
    with pytest.raises(api.DeadlineExceeded, match=r"within 0\.3 s"):
        connect(server.url, timeout=50, deadline_ms=40_000).match("red tent", **options)
    assert server.left.wait(20)


def test_retries_share_the_time_of_the_call(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.slow(0.2, steps.problem(429, "queue-full", retry_after="0")))
    with pytest.raises((api.QueueFull, api.DeadlineExceeded)):
        connect(server.url, timeout=0.5, retries=1000).match("red tent")
    # A fourth would have begun 0.6 s after the first.
    assert 1 <= len(server.seen) <= 3


def test_the_deadline_is_told_and_what_is_left_of_it(
    connect: Connect, scripted: Callable, steps: Any
) -> None:
    full = steps.slow(0.1, steps.problem(429, "queue-full", retry_after="0"))
    server = scripted(full, steps.drop, steps.reply())
    connect(server.url, timeout=60).match("red tent", deadline_ms=20_000)
    first, second, third = (int(seen.headers["x-request-timeout-ms"]) for seen in server.seen)
    assert first == 20_000
    assert 0 < third <= second <= 19_900


def test_whose_deadline_is_told(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(steps.reply(body=steps.ANSWER[:-1] + b',"results":[],' + PHRASE[1:]))
    client = connect(server.url, timeout=10, deadline_ms=7000)
    client.match("red tent")
    client.match_many([], deadline_ms=3000)
    client.match("red tent", deadline_ms=30_000)
    client.get_phrase("p")
    connect(server.url).match("red tent")
    told = [seen.headers.get("x-request-timeout-ms") for seen in server.seen]
    assert told == ["7000", "3000", "10000", None, None]


def test_probes_ask_once(connect: Connect, scripted: Callable, steps: Any) -> None:
    server = scripted(
        steps.problem(503, "stopping"), steps.drop, steps.stall, steps.problem(404, "not-found")
    )
    client = connect(server.url, timeout=20)
    assert client.ready() is False
    assert client.healthy() is False
    assert client.ready(timeout=0.2) is False
    with pytest.raises(api.NotFound):
        client.ready()
    assert len(server.seen) == 4
