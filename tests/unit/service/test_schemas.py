from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace

import jsonschema_rs
import pytest

from bidmatch.base.text import normalise
from service.problems import ProblemError
from service.schemas import SOMETHING_VISIBLE, Asked, MatchRequests
from service.settings import Settings

LIMITS = Settings(
    bundle="b",  # type: ignore[arg-type]
    max_k=20,
    max_queries=3,
    max_query_chars=8,
    max_listed=2,
    max_phrases=2,
)


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


def listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, {"filter": None, "allow": None, "deny": (), "distinct": False}),
        ({"allow": None, "filter": None}, {"filter": None, "allow": None}),
        ({"allow": [], "deny": []}, {"allow": [], "deny": []}),
        ({"allow": ["a", " "], "deny": ["\0", "ü" * 200]}, {"allow": ["a", " "], "deny": ["\0", "ü" * 200]}),
        ({"distinct": True}, {"distinct": True}),
        ({"filter": {"market": ["de"]}}, {"filter": {"market": ["de"]}}),
        ({"filter": {}}, {"filter": {}}),
    ],
)
def test_rules_that_are_taken(requests: MatchRequests, body: dict, wanted: dict) -> None:
    for what in ({"query": "a"}, {"queries": ["a", "b"]}):
        asked = requests.parse(json.dumps(what | body).encode())
        assert {name: listed(getattr(asked, name)) for name in wanted} == {
            name: listed(value) for name, value in wanted.items()
        }
    assert requests.explain(json.dumps({"query": "a", "ids": ["x"]} | body).encode()).ids == ["x"]


@pytest.mark.parametrize(
    ("body", "where", "reason"),
    [
        ({"allow": ["a", "b", "c"]}, "body.allow", "at most 2"),
        ({"deny": ["a", "b", "c"]}, "body.deny", "at most 2"),
        ({"deny": None}, "body.deny", "valid array"),
        ({"deny": [""]}, "body.deny.0", "at least 1"),
        ({"allow": ["a", "b" * 201]}, "body.allow.1", "at most 200"),
        ({"allow": [1]}, "body.allow.0", "valid string"),
        ({"allow": "a"}, "body.allow", "valid array"),
        ({"distinct": 1}, "body.distinct", "valid boolean"),
        ({"distinct": None}, "body.distinct", "valid boolean"),
        ({"filter": []}, "body.filter", "be an object"),
        ({"ids": ["a"]}, "body.ids", "not permitted"),
    ],
)
def test_rules_that_are_refused_and_why(requests: MatchRequests, body: dict, where: str, reason: str) -> None:
    with pytest.raises(ProblemError, match=reason) as refused:
        requests.parse(json.dumps({"query": "a"} | body).encode())
    assert refused.value.status == 422
    assert [error.where for error in refused.value.errors] == [where]


def test_a_body_of_query_and_k_alone_is_read_as_any_other(requests: MatchRequests) -> None:
    """Most bodies are such, and have a way of their own."""
    values: list[object] = [
        "a",
        "",
        "12345678",
        "123456789",
        " ",
        "\u200b",
        "\ud800",
        "ü",
        None,
        1,
        True,
        ["a"],
    ]
    numbers: list[object] = [1, 20, 0, 21, -1, 2.0, 2.5, True, None, "2", 2**63, 10**30]
    bodies = [json.dumps({"query": value}) for value in values]
    bodies += [json.dumps({"query": value, "k": k}) for value in values for k in numbers]
    bodies += [json.dumps({"k": k, "query": "a"}) for k in numbers]
    bodies += [
        '{"query": "a", "query": "b"}',
        '{"query": "a", "k": 2, "k": 30}',
        '{"query": "a", "k": 30, "k": 2}',
    ]
    bodies += ['{"query": "a", "min_score": null}', '{"query": "a", "k": 1e0}', "", "{", "[]", "null", "NaN"]
    for body in bodies:
        simple = requests._simple(body.encode())
        try:
            checked = requests._checked(body.encode())
            checked = replace(checked, deny=tuple(checked.deny), ids=tuple(checked.ids))
        except ProblemError:
            checked = None
        assert simple is None or simple == checked, body
    assert requests._simple(b'{"query": "a", "k": 3}') == Asked(["a"], 3)


def test_a_request_is_plain_where_any_bundle_can_tell_what_it_asks() -> None:
    assert Asked(queries=["a"], k=1, min_score=0.1).plain
    for more in ({"min_relevance": 0.0}, {"filter": {}}, {"allow": []}, {"deny": ["a"]}, {"distinct": True}):
        assert not Asked(queries=["a"], k=1, **more).plain


def test_phrases_that_are_taken(requests: MatchRequests) -> None:
    one, other = requests.put_phrases(
        b'{"phrases": [{"id": "a/b", "text": " A  "}, {"id": "2", "text": "b", "columns": {"n": [1, null]}}]}'
    )
    assert (one.id, one.text, one.columns) == ("a/b", " A  ", {})
    assert (other.id, other.text, other.columns) == ("2", "b", {"n": [1, None]})


@pytest.mark.parametrize(
    ("body", "where", "reason"),
    [
        ({}, "body.phrases", "required"),
        ({"phrases": []}, "body.phrases", "at least 1"),
        ({"phrases": [{"id": "a", "text": "a"}] * 3}, "body.phrases", "at most 2"),
        ({"phrases": [{"id": "a"}]}, "body.phrases.0.text", "required"),
        ({"phrases": [{"text": "a"}]}, "body.phrases.0.id", "required"),
        ({"phrases": [{"id": "", "text": "a"}]}, "body.phrases.0.id", "at least 1"),
        ({"phrases": [{"id": "a" * 201, "text": "a"}]}, "body.phrases.0.id", "at most 200"),
        ({"phrases": [{"id": 1, "text": "a"}]}, "body.phrases.0.id", "valid string"),
        ({"phrases": [{"id": "a", "text": "\u200b "}]}, "body.phrases.0.text", "empty or only white space"),
        ({"phrases": [{"id": "a", "text": "123456789"}]}, "body.phrases.0.text", "at most 8"),
        ({"phrases": [{"id": "a", "text": "a", "columns": None}]}, "body.phrases.0.columns", "be an object"),
        ({"phrases": [{"id": "a", "text": "a", "state": "paused"}]}, "body.phrases.0.state", "not permitted"),
        ({"phrases": [{"id": "a", "text": "a"}], "more": 1}, "body.more", "not permitted"),
    ],
)
def test_phrases_that_are_refused_and_why(
    requests: MatchRequests, body: dict, where: str, reason: str
) -> None:
    with pytest.raises(ProblemError, match=reason) as refused:
        requests.put_phrases(json.dumps(body).encode())
    assert refused.value.status == 422
    assert [error.where for error in refused.value.errors] == [where]


def test_bundles_that_are_named(requests: MatchRequests) -> None:
    assert requests.reload(b"") is None
    assert requests.reload(b"{}") is None
    assert requests.reload(b'{"bundle": null}') is None
    assert requests.reload(b'{"bundle": "/some/where"}') == "/some/where"
    for wrong in (
        b'{"bundle": ""}',
        b'{"bundle": 1}',
        b'{"path": "a"}',
        b"[]",
        b"null",
        b'{"bundle": "%b"}' % (b"a" * 4097),
    ):
        with pytest.raises(ProblemError) as refused:
            requests.reload(wrong)
        assert refused.value.status == 422, wrong


def test_every_body_that_is_no_json_is_refused_as_such(requests: MatchRequests) -> None:
    for parse in (requests.parse, requests.explain, requests.put_phrases, requests.reload):
        for body in (b"{", b"\xff", b'"\\ud800"', b"[" * 1000):
            with pytest.raises(ProblemError) as refused:
                parse(body)
            assert (refused.value.status, refused.value.kind) == (400, "malformed-json"), body


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
        {"query": "a", "allow": None}, {"query": "a", "allow": []}, {"query": "a", "allow": ["", "b"]},
        {"query": "a", "allow": ["a"] * 3}, {"query": "a", "allow": [None]}, {"query": "a", "deny": None},
        {"query": "a", "deny": ["a"]}, {"query": "a", "deny": ["a" * 201]}, {"query": "a", "deny": "a"},
        {"query": "a", "distinct": True}, {"query": "a", "distinct": 0}, {"query": "a", "distinct": None},
        {"query": "a", "filter": None}, {"query": "a", "filter": {}}, {"query": "a", "filter": "market"},
        {"query": "a", "ids": ["a"]},
    ):  # fmt: skip
        assert taken(requests.parse, body) == validator.is_valid(body), body


def taken(parse: Callable[[bytes], object], body: object) -> bool:
    try:
        parse(json.dumps(body).encode())
    except ProblemError:
        return False
    return True


def test_the_other_schemas_say_what_the_checks_do(requests: MatchRequests) -> None:
    one = {"id": "a", "text": "a"}
    cases: dict[str, tuple[Callable[[bytes], object], list[object]]] = {
        "PhrasesRequest": (
            requests.put_phrases,
            [
                {"phrases": [one]}, {"phrases": [one] * 2}, {"phrases": [one] * 3}, {"phrases": []}, {}, [],
                {"phrases": [one | {"columns": {}}]}, {"phrases": [one | {"columns": []}]},
                {"phrases": [one | {"columns": {"a": {"b": None}}}]}, {"phrases": [one | {"x": 1}]},
                {"phrases": [one | {"id": ""}]}, {"phrases": [one | {"id": "a" * 201}]},
                {"phrases": [one | {"text": " "}]}, {"phrases": [one | {"text": "a" * 9}]},
                {"phrases": [one | {"text": None}]}, {"phrases": [one], "more": None}, {"phrases": one},
            ],
        ),
        "ReloadRequest": (
            requests.reload,
            [{}, {"bundle": None}, {"bundle": ""}, {"bundle": "a"}, {"bundle": 1}, {"x": 1}, [], None,
             {"bundle": "a" * 4096}, {"bundle": "a" * 4097}],
        ),
        "ExplainRequest": (
            requests.explain,
            [{"query": "a"}, {}, {"queries": ["a"]}, {"query": "a", "ids": []}, {"query": "a", "ids": None},
             {"query": "a", "ids": ["a"] * 3}, {"query": "a", "ids": [""]}, {"query": "", "ids": ["a"]},
             {"query": "a", "k": 0}, {"query": "a", "deny": ["a"], "ids": ["a"]}, {"query": "a", "x": 1}],
        ),
    }  # fmt: skip
    for name, (parse, bodies) in cases.items():
        document = {"$defs": requests.components(), "$ref": f"#/$defs/{name}"}
        # The document's own references point into its components.
        text = json.dumps(document).replace("#/components/schemas/", "#/$defs/")
        validator = jsonschema_rs.validator_for(text)
        verdicts = {taken(parse, body) for body in bodies}
        assert verdicts == {True, False}
        for body in bodies:
            assert taken(parse, body) == validator.is_valid(body), (name, body)
