from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidmatch.client import AsyncClient, Client, calls
from bidmatch.client.exchange import (
    BACKOFF,
    Broken,
    Budget,
    Exchange,
    Late,
    Outcome,
    Reply,
    Undecodable,
    parse_retry_after,
    seconds_asked_for,
)


def problem(status: int, kind: str, retry_after: str | None = None) -> Reply:
    return Reply(status, json.dumps({"type": f"urn:bidmatch:{kind}", "detail": "x"}).encode(), retry_after)


def exchange(seconds: float = 1000, retries: int = 2, max_wait: float = 5) -> Exchange[Any]:
    return Exchange(calls.metrics(), seconds, False, retries, max_wait, "http://here")


@pytest.mark.parametrize(
    ("outcome", "repeatable", "other"),
    [
        (problem(429, "queue-full"), 0, 0),
        (problem(429, "queue-full", "3"), 3, 3),
        (problem(503, "stopping"), 0, 0),
        (problem(503, "stopping", "2"), 2, 2),
        (problem(503, "too-many-connections", "1"), 1, 1),
        (problem(503, "not-stored"), 0, None),
        (problem(503, "not-stored", "1"), 1, None),
        (problem(503, "not-ready"), None, None),
        (Reply(503, b"<html>", "1"), None, None),
        (Reply(429, b"<html>", "1"), 1, 1),
        (Broken(OSError(), answered=False), 0, None),
        (Broken(OSError(), answered=True), None, None),
        (Late(), None, None),
        (Undecodable(ValueError()), None, None),
        (Reply(200, b"{}"), None, None),
        (problem(504, "deadline", "1"), None, None),
        (problem(500, "internal-error", "1"), None, None),
        (problem(422, "stopping", "1"), None, None),
    ],
)
def test_what_is_a_reason_to_retry(outcome: Outcome, repeatable: float | None, other: float | None) -> None:
    assert seconds_asked_for(outcome, True) == repeatable
    assert seconds_asked_for(outcome, False) == other


@given(
    asked=st.floats(0, 100), max_wait=st.floats(0, 100), retries=st.integers(0, 5), left=st.floats(0.001, 200)
)
def test_waits(asked: float, max_wait: float, retries: int, left: float) -> None:
    one = exchange(left, retries, max_wait)
    reply = problem(429, "queue-full", repr(asked))
    least = min(asked, max_wait)
    waits = []
    while (wait := one.wait(reply)) is not None:
        spread = max(BACKOFF * 2 ** len(waits), least / 4)
        assert least <= wait <= least + spread
        assert wait < left
        waits.append(wait)
    assert len(waits) <= retries
    if left > least + max(BACKOFF * 2**retries, least / 4) + 60:
        assert len(waits) == retries


def test_those_turned_away_together_come_back_apart() -> None:
    reply = problem(429, "queue-full", "1")
    waits = {exchange().wait(reply) for _ in range(100)}
    assert len(waits) == 100


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("0", 0),
        ("7", 7),
        (" 7 ", 7),
        ("0.5", 0.5),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds


def test_retry_after_a_date() -> None:
    in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
    for date in (
        format_datetime(in_a_minute, usegmt=True),
        format_datetime(in_a_minute.replace(tzinfo=None)),
    ):
        seconds = parse_retry_after(date)
        assert seconds is not None
        assert 0 < seconds <= 60


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "url is 'localhost:8000'"),
        ({"url": "ftp://there"}, "url is"),
        ({"url": "http://"}, "url is"),
        ({"url": "http://there?a=b"}, "url is"),
        ({"url": "http://there:99999"}, "[Pp]ort"),
        ({"url": "http://me:secret@there"}, "url has a user in it"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "a\r\nX: b"}, "api_key"),
        ({"api_key": "schlüssel"}, "api_key"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"timeout": math.inf}, "timeout is inf"),
        ({"deadline_ms": 0}, "deadline_ms is 0"),
        ({"deadline_ms": 2.5}, "deadline_ms is 2.5"),
        ({"retries": -1}, "retries is -1"),
        ({"max_wait": -1}, "max_wait is -1"),
        ({"max_wait": math.nan}, "max_wait is nan"),
        ({"connections": 0}, "connections is 0"),
    ],
)
def test_settings_that_cannot_be(kind: type, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        kind(**{"url": "http://localhost:8000"} | options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"deadline_ms": 0}, {"deadline_ms": -5}, {"timeout": 0}, {"timeout": -1}]
)
def test_times_of_a_call_that_cannot_be(options: dict[str, Any]) -> None:
    with Client("http://localhost:1", deadline_ms=50) as client, pytest.raises(ValueError, match=r"is (0|-)"):
        client.match("a", **options)


def test_every_step_may_take_what_is_left_of_the_whole() -> None:
    one = exchange(seconds=0.05)
    budget = Budget(one)
    before = [budget.get(step) for step in ("pool", "connect", "write", "read")]
    assert before == sorted(before, reverse=True)
    assert 0 < before[-1] < before[0] <= 0.05
    while one.left() > 0:
        time.sleep(0.01)
    assert budget.get("read") == budget["read"] == 0.001


def test_a_key_is_not_shown() -> None:
    client = Client("http://localhost:8000/", "secret")
    assert repr(client) == "Client('http://localhost:8000')"
    assert "secret" not in repr(client._terms)
