from __future__ import annotations

import json
import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest

from bidmatch.client import InvalidRequest, NewPhrase, ProtocolError, calls

PLAIN: tuple[Any, ...] = (10, None, None, None, None, None, False)


def body(call: calls.Call[Any]) -> Any:
    assert call.body is not None
    return json.loads(call.body)


def test_options_that_are_not_given_are_not_sent() -> None:
    call = calls.match("red tent", *PLAIN)
    assert (call.method, call.path, call.repeatable) == ("POST", "/match", True)
    assert body(call) == {"query": "red tent", "k": 10}


def test_every_option() -> None:
    filter = {"market": "de", "price": {"gte": 1, "not": (3, 4)}, "language": ["de", "en"]}
    call = calls.match_many(iter(["a", "ü"]), 3, 0.0, 0.5, filter, {"p1"}, (f"p{i}" for i in range(2)), True)
    assert body(call) == {
        "queries": ["a", "ü"],
        "k": 3,
        "min_score": 0.0,
        "min_relevance": 0.5,
        "filter": {"market": "de", "price": {"gte": 1, "not": [3, 4]}, "language": ["de", "en"]},
        "allow": ["p1"],
        "deny": ["p0", "p1"],
        "distinct": True,
    }


def test_no_phrase_allowed_is_not_every_phrase() -> None:
    assert body(calls.match("a", 10, None, None, None, [], [], False))["allow"] == []


def test_mappings_of_any_kind() -> None:
    filter = MappingProxyType({"market": OrderedDict(gte="a"), "kind": frozenset(["x"])})
    assert body(calls.match("a", 1, None, None, filter, None, None, False))["filter"] == {  # type: ignore[arg-type]
        "market": {"gte": "a"},
        "kind": ["x"],
    }


def test_text_is_sent_in_utf8_not_in_escapes() -> None:
    call = calls.match("größe 花园", *PLAIN)
    assert call.body is not None
    assert "größe 花园".encode() in call.body


@pytest.mark.parametrize("query", ["\ud800", math.nan, object()], ids=["a lone surrogate", "nan", "object"])
def test_what_cannot_be_sent(query: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent as JSON") as caught:
        calls.match(query, *PLAIN)
    assert caught.value.status is None


def test_one_text_is_not_taken_for_many() -> None:
    with pytest.raises(TypeError, match="queries takes several"):
        calls.match_many("red tent", *PLAIN)
    with pytest.raises(TypeError, match="deny takes several"):
        calls.match("red tent", 10, None, None, None, None, "p1", False)


def test_another_number_of_results_than_queries() -> None:
    call = calls.match_many(["a", "b"], *PLAIN)
    with pytest.raises(ProtocolError, match="has 1 results where 2 were asked for"):
        call.read(b'{"results":[{"query":"a","matches":[]}],"bundle":"b"}')


def test_phrases() -> None:
    call = calls.put_phrases([NewPhrase("p1", "red tent", {"match_type": "exact"}), NewPhrase("p2", "tent")])
    assert (call.method, call.path) == ("POST", "/phrases")
    assert body(call) == {
        "phrases": [
            {"id": "p1", "text": "red tent", "columns": {"match_type": "exact"}},
            {"id": "p2", "text": "tent"},
        ]
    }
    with pytest.raises(ProtocolError, match="has 0 phrases where 2 were asked for"):
        call.read(b'{"phrases":[]}')


@pytest.mark.parametrize(
    ("id", "path"),
    [
        ("p1", "/phrases/p1"),
        ("a/b?c#d", "/phrases/a%2Fb%3Fc%23d"),
        ("100%", "/phrases/100%25"),
        ("grün", "/phrases/gr%C3%BCn"),
        (".", "/phrases/%2E"),
        ("..", "/phrases/%2E%2E"),
        ("a.b", "/phrases/a.b"),
    ],
)
def test_paths_of_phrases(id: str, path: str) -> None:
    assert calls.get_phrase(id).path == path
    assert calls.pause(id).path == path + "/pause"
    assert calls.resume(id).path == path + "/resume"
    assert (calls.remove(id).method, calls.remove(id).path) == ("DELETE", path)


@pytest.mark.parametrize("id", ["", "\ud800"])
def test_ids_that_no_path_can_have(id: str) -> None:
    with pytest.raises(InvalidRequest):
        calls.get_phrase(id)


def test_only_a_reload_is_not_repeatable() -> None:
    assert not calls.reload("/b").repeatable
    assert body(calls.reload("/b")) == {"bundle": "/b"}
    assert body(calls.reload(None)) == {}
    others = [calls.put_phrases([]), calls.remove("a"), calls.pause("a"), calls.resume("a"), calls.metrics()]
    assert all(call.repeatable for call in others)


def test_explain() -> None:
    call = calls.explain("red tent", *PLAIN, ["p1"])
    assert (call.path, body(call)) == ("/admin/explain", {"query": "red tent", "k": 10, "ids": ["p1"]})
    with pytest.raises(ProtocolError, match="the answer to POST /admin/explain: query is missing"):
        call.read(b'{"tokens":["red","tent"]}')
