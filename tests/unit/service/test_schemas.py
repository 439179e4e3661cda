from __future__ import annotations

import json
import re
import unicodedata

import jsonschema_rs
import pytest

from bidmatch.base.text import normalise
from service.problems import ProblemError
from service.schemas import SOMETHING_VISIBLE, MatchRequests
from service.settings import Settings

LIMITS = Settings(bundle="b", max_k=20, max_queries=3, max_query_chars=8)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def requests() -> MatchRequests:
    return MatchRequests(LIMITS)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"query": "a"}', (["a"], 10, None, False)),
        ('{"query": "a", "k": 20, "min_score": -2}', (["a"], 20, -2.0, False)),
        ('{"query": "a", "k": 3.0, "min_score": null}', (["a"], 3, None, False)),
        ('{"queries": ["a", "", "a"], "min_score": 0.5}', (["a", "", "a"], 10, 0.5, True)),
        ('{"query": "12345678"}', (["12345678"], 10, None, False)),
    ],
)
def test_what_is_taken(requests: MatchRequests, body: str, wanted: tuple) -> None:
    asked = requests.parse(body.encode())
    assert (asked.queries, asked.k, asked.min_score, asked.many) == wanted


@pytest.mark.parametrize(
    ("body", "where", "reason"),
    [
        ('{"query": "a", "min_relevance": 1.1}', "body.min_relevance", "less than or equal to 1"),
        ('{"query": "a", "min_relevance": "0.5"}', "body.min_relevance", "valid number"),
        ('{"query": " "}', "body.query", "empty or only white space"),
        ('{"query": "123456789"}', "body.query", "at most 8"),
        ('{"queries": ["a", "123456789"]}', "body.queries.1", "at most 8"),
        ('{"queries": ["a", "b", "c", "d"]}', "body.queries", "at most 3"),
        ('{"query": "a", "k": 21}', "body.k", "less than or equal to 20"),
        ('{"query": "a", "min_score": 2.1}', "body.min_score", "less than or equal to 2"),
        ('{"query": "a", "kk": 1}', "body.kk", "not permitted"),
        ('{"query": "a", "queries": ["b"]}', "body", "exactly one of"),
        ('"a"', "body", "exactly one of"),
    ],
)
def test_what_is_refused_and_why(requests: MatchRequests, body: str, where: str, reason: str) -> None:
    with pytest.raises(ProblemError, match=reason) as refused:
        requests.parse(body.encode())
    assert refused.value.status == 422
    assert [error.where for error in refused.value.errors] == [where]


def test_the_pattern_in_the_schema_is_what_normalise_leaves_something_of() -> None:
    for code in range(0x11_0000):
        character = chr(code)
        if unicodedata.category(character) != "Cs":
            assert bool(re.search(SOMETHING_VISIBLE, character)) == bool(normalise(character)), hex(code)


def test_the_schema_says_what_the_check_does(requests: MatchRequests) -> None:
    schemas = requests.components()
    document = {
        "$defs": schemas,
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in ("QueryRequest", "QueriesRequest")],
    }
    validator = jsonschema_rs.validator_for(document)
    for body in (
        {"query": "a"}, {"query": ""}, {"query": "\u200b"}, {"query": "a" * 9}, {"query": None}, {},
        {"query": "a", "queries": ["a"]}, {"queries": []}, {"queries": [""]}, {"queries": ["a"] * 4},
        {"query": "a", "k": 0}, {"query": "a", "k": 20}, {"query": "a", "k": 21}, {"query": "a", "k": 2.0},
        {"query": "a", "k": 2.5}, {"query": "a", "k": True}, {"query": "a", "k": None},
        {"query": "a", "min_relevance": 0.5}, {"query": "a", "min_relevance": -1},
        {"query": "a", "min_relevance": 1}, {"query": "a", "min_relevance": None},
        {"query": "a", "min_score": None}, {"query": "a", "min_score": 3}, {"query": "a", "min_score": False},
        {"query": "a", "more": 1}, [], "a", None,
    ):  # fmt: skip
        try:
            requests.parse(json.dumps(body).encode())
            taken = True
        except ProblemError:
            taken = False
        assert taken == validator.is_valid(body), body
