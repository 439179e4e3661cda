from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from bidmatch.client import (
    Answer,
    Answers,
    Candidate,
    Explanation,
    Match,
    Phrase,
    ProtocolError,
    Reload,
    Result,
    answers,
)

MATCH = {
    "id": "p1",
    "phrase": "red tent",
    "score": 1.5,
    "parts": {"encoder": 1.0, "classifier": 0.5},
    "source": "index",
}
PHRASE = {
    "id": "p1",
    "text": "red tent",
    "columns": {"match_type": "exact"},
    "state": "paused",
    "source": "live",
    "changed": "2024-05-01T10:00:00.25Z",
}
RELOAD = {
    "bundle": "b2",
    "previous": "b1",
    "phrases": 400,
    "live_phrases": 3,
    "agreement": 0.75,
    "seconds": 2,
}
EXPLANATION = {
    "query": "red tent",
    "tokens": ["red", "tent"],
    "words": ["red", "tent"],
    "ef": 100,
    "depth": 20,
    "admitted": 400,
    "searched": "graph",
    "rescored": False,
    "candidates": [
        MATCH | {"rank": 1, "dropped": None},
        MATCH | {"rank": None, "dropped": "deny: in the list"},
    ],
    "missing": ["p9"],
    "bundle": "b1",
}
ONE = {"matches": [MATCH, MATCH], "bundle": "b1"}
MANY = {"results": [{"query": "tent", "matches": []}, {"query": "red", "matches": [MATCH]}], "bundle": "b1"}

DOCUMENTS: dict[str, tuple[Any, Any]] = {
    "one": (answers.answer, ONE),
    "many": (answers.answers, MANY),
    "phrase": (answers.phrase, PHRASE),
    "phrases": (answers.phrases, {"phrases": [PHRASE, PHRASE]}),
    "reload": (answers.reload, RELOAD),
    "explanation": (answers.explanation, EXPLANATION),
}
OPTIONAL = {"relevance", "columns"}
# They have to be there, if only to say that there is nothing.
NULLABLE = {"agreement", "rank", "dropped"}


def read(name: str, document: object) -> Any:
    return answers.decode(json.dumps(document).encode(), "POST /there", DOCUMENTS[name][0])


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each field of a document is."""
    found = []
    for name, value in document.items() if isinstance(document, dict) else enumerate(document):
        here = (*path, name)
        if isinstance(name, str):
            found.append(here)
        if isinstance(value, dict | list) and name != "columns":
            found += places(value, here)
    return found


def written(path: tuple[Any, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def shown(value: Any) -> str:
    return value if isinstance(value, str) else written(value)


FIELDS = [(name, path) for name, (_, document) in DOCUMENTS.items() for path in places(document)]


def test_there_are_fields() -> None:
    assert ("many", ("results", 1, "matches", 0, "parts", "encoder")) in FIELDS
    assert len(FIELDS) > 40


def changed(name: str, path: tuple[Any, ...], change: Any) -> Any:
    document = json.loads(json.dumps(DOCUMENTS[name][1]))
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    change(inner, path[-1])
    return document


@pytest.mark.parametrize(("name", "path"), FIELDS, ids=shown)
def test_a_missing_field_is_named(name: str, path: tuple[Any, ...]) -> None:
    document = changed(name, path, lambda inner, last: inner.pop(last))
    if path[-1] in OPTIONAL:
        read(name, document)
        return
    with pytest.raises(ProtocolError) as caught:
        read(name, document)
    assert caught.value.detail == f"the answer to POST /there: {written(path)} is missing"


@pytest.mark.parametrize(("name", "path"), FIELDS, ids=shown)
@pytest.mark.parametrize("value", [None, True, "2 May", [[]], {"a": 1}], ids=repr)
def test_a_field_of_another_type_is_named(name: str, path: tuple[Any, ...], value: object) -> None:
    before = DOCUMENTS[name][1]
    for part in path:
        before = before[part]
    if isinstance(value, type(before)) and path[-1] != "changed" and not isinstance(value, list):
        return
    if path[-1] in OPTIONAL | NULLABLE and (value is None or before is None):
        return
    with pytest.raises(ProtocolError) as caught:
        read(name, changed(name, path, lambda inner, last: inner.__setitem__(last, value)))
    assert written(path) in caught.value.detail


@pytest.mark.parametrize(("name", "path"), FIELDS, ids=shown)
def test_unknown_fields_are_passed_over(name: str, path: tuple[Any, ...]) -> None:
    if path[-1] == "columns":
        return
    document = changed(name, path, lambda inner, _: inner.__setitem__("of a newer service", {"x": [1]}))
    assert read(name, document) == read(name, DOCUMENTS[name][1])


def test_matches() -> None:
    match = Match("p1", "red tent", 1.5, 1.0, 0.5, "index")
    assert read("one", ONE) == Answer((match, match), "b1")
    assert read("many", MANY) == Answers((Result("tent", ()), Result("red", (match,))), "b1")
    more = {**MATCH, "relevance": 0, "columns": {"market": "de"}}
    (found,) = read("one", {"matches": [more], "bundle": "b1"}).matches
    assert (found.relevance, found.columns) == (0.0, {"market": "de"})
    assert (
        read("one", {"matches": [MATCH | {"relevance": None}], "bundle": "b1"}).matches[0].relevance is None
    )


def test_phrases() -> None:
    changed_at = datetime(2024, 5, 1, 10, 0, 0, 250_000, UTC)
    expected = Phrase("p1", "red tent", {"match_type": "exact"}, "paused", "live", changed_at)
    assert read("phrase", PHRASE) == expected
    assert read("phrases", {"phrases": [PHRASE]}) == (expected,)
    with pytest.raises(ProtocolError, match="changed is not a time"):
        read("phrase", PHRASE | {"changed": "yesterday"})


def test_a_reload() -> None:
    assert read("reload", RELOAD) == Reload("b2", "b1", 400, 3, 0.75, 2.0)
    assert read("reload", RELOAD | {"agreement": None}).agreement is None
    for number in (2.5, float("nan"), float("inf")):
        with pytest.raises(ProtocolError, match="phrases is not a whole number"):
            read("reload", RELOAD | {"phrases": number})


def test_an_explanation() -> None:
    matched = Candidate("p1", "red tent", 1.5, 1.0, 0.5, "index", 1, None)
    dropped = Candidate("p1", "red tent", 1.5, 1.0, 0.5, "index", None, "deny: in the list")
    words = ("red", "tent")
    assert read("explanation", EXPLANATION) == Explanation(
        "red tent", words, words, 100, 20, 400, "graph", False, (matched, dropped), ("p9",), "b1"
    )


@pytest.mark.parametrize("name", ["rank", "dropped"])
@pytest.mark.parametrize("value", [True, [[]], {"a": 1}], ids=repr)
def test_what_became_of_a_candidate_is_a_place_or_a_rule(name: str, value: object) -> None:
    candidate = MATCH | {"rank": None, "dropped": None, name: value}
    with pytest.raises(ProtocolError, match=rf"candidates\[0\]\.{name} is not a"):
        read("explanation", EXPLANATION | {"candidates": [candidate]})


def test_answers_are_immutable_and_can_be_kept_in_sets() -> None:
    answer = read("one", ONE)
    assert len({answer, read("one", ONE)}) == 1
    with pytest.raises(AttributeError):
        answer.bundle = "b2"
    with pytest.raises(AttributeError):
        answer.matches[0].score = 2.0


@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[" * 100_000, b'"text"', b"5", b"null"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_no_answer(name: str, body: bytes) -> None:
    with pytest.raises(ProtocolError, match="the answer to POST /there"):
        answers.decode(body, "POST /there", DOCUMENTS[name][0])
