"""Phrases and administration, against a server that speaks their contract."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bidmatch import client as api

Connect = Callable[..., Any]


def test_the_life_of_a_phrase(connect: Connect, contract: Any) -> None:
    client = connect(contract.url, api_key=contract.admin_token, timeout=20)
    columns = {"match_type": "phrase", "negative_keywords": ["used", '"for rent"']}
    put = client.put_phrases([api.NewPhrase("p1", "Red Tents", columns), api.NewPhrase("p2", "tent")])
    assert [phrase.id for phrase in put] == ["p1", "p2"]
    first = put[0]
    assert (first.text, first.columns, first.state, first.source) == ("Red Tents", columns, "active", "live")
    assert abs(datetime.now(UTC) - first.changed) < timedelta(minutes=1)
    assert client.get_phrase("p1") == first
    assert client.pause("p1").state == "paused"
    assert client.get_phrase("p1").state == "paused"
    assert client.resume("p1").state == "active"
    assert client.remove("p1").state == "removed"
    assert client.get_phrase("p2").columns == {}


@pytest.mark.parametrize(
    "id", ["a/b", "..", ".", "../match", "a?b#c", "100%", "%2F", "größe 👟", " ", "p/pause"]
)
def test_any_id(connect: Connect, contract: Any, id: str) -> None:
    client = connect(contract.url, api_key=contract.admin_token, timeout=20)
    client.put_phrases([api.NewPhrase(id, "tent")])
    assert client.get_phrase(id).id == id
    assert client.pause(id).state == "paused"
    assert client.resume(id).state == "active"
    assert client.remove(id).id == id


def test_a_phrase_that_is_not_there(connect: Connect, contract: Any) -> None:
    client = connect(contract.url, api_key=contract.admin_token, timeout=20)
    for method in (client.get_phrase, client.pause, client.resume, client.remove):
        with pytest.raises(api.NotFound, match="404 not-found: there is no phrase 'nowhere'"):
            method("nowhere")


def test_phrases_that_are_refused(connect: Connect, contract: Any) -> None:
    client = connect(contract.url, api_key=contract.admin_token, timeout=20)
    with pytest.raises(api.InvalidRequest) as caught:
        client.put_phrases([api.NewPhrase("p8", "tent"), api.NewPhrase("p9", " ")])
    assert caught.value.errors == (api.FieldError("body.phrases.1.text", "is empty"),)
    with pytest.raises(api.NotFound):
        client.get_phrase("p8")


def test_keys(connect: Connect, contract: Any) -> None:
    for key, status in ((None, 401), ("another", 401), (contract.match_key, 403)):
        with pytest.raises(api.Unauthorized) as caught:
            connect(contract.url, api_key=key, timeout=20).get_phrase("p1")
        assert caught.value.status == status


def test_reload(connect: Connect, contract: Any) -> None:
    client = connect(contract.url, api_key=contract.admin_token)
    done = client.reload("/bundles/tuesday")
    assert (done.bundle, done.previous, done.phrases, done.seconds) == ("b2", "b1", 400, 0.25)
    assert client.reload() == done
    with pytest.raises(api.InvalidRequest) as caught:
        client.reload("/damaged")
    assert caught.value.kind == "bundle-refused"
    with pytest.raises(api.Conflict) as running:
        client.reload("/running")
    assert running.value.kind == "reload-running"


def test_explain(connect: Connect, contract: Any) -> None:
    client = connect(contract.url, api_key=contract.admin_token)
    explanation = client.explain("used red tents", k=3, deny=["p1"], ids=["p1"])
    assert explanation["tokens"] == ["used", "red", "tents"]
    assert explanation["candidates"][0]["dropped"] == "deny"
