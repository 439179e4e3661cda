from __future__ import annotations

import math
from typing import Any

import jsonschema_rs
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.rules.filters import (
    MAX_COLUMNS,
    MAX_VALUES,
    Bound,
    Condition,
    Filter,
    FilterError,
    filter_schema,
    parse_filter,
)

SCHEMA = pa.schema(
    [
        ("market", pa.string()),
        ("language", pa.dictionary(pa.int8(), pa.string())),
        ("advertiser", pa.int32()),
        ("big", pa.uint64()),
        ("bid", pa.float64()),
        ("price", pa.float32()),
        ("live", pa.bool_()),
        ("tags", pa.list_(pa.string())),
        ("since", pa.timestamp("ms", "UTC")),
        ("until", pa.date32()),
        ("never", pa.null()),
        ("place", pa.struct([("x", pa.int8())])),
    ]
)
NS = 10**9


@pytest.mark.parametrize(
    ("raw", "condition"),
    [
        ({"market": "de"}, Condition("market", among=("de",))),
        ({"market": ["fr", "de", "fr"]}, Condition("market", among=("de", "fr"))),
        ({"market": {"gte": "d", "lt": "e"}}, Condition("market", None, Bound("d", True), Bound("e", False))),
        ({"language": {"not": "de"}}, Condition("language", excluded=("de",))),
        ({"advertiser": 7.0}, Condition("advertiser", among=(7,))),
        (
            {"advertiser": {"gt": 1.5, "not": [3, 2]}},
            Condition("advertiser", None, Bound(1.5, False), None, (2, 3)),
        ),
        ({"big": 2**64 - 1}, Condition("big", among=(2**64 - 1,))),
        ({"bid": [1, 0.5]}, Condition("bid", among=(0.5, 1))),
        ({"bid": {"lte": 10**400}}, Condition("bid", None, None, Bound(10**400, True))),
        ({"price": 0.1}, Condition("price", among=(0.10000000149011612,))),
        ({"price": {"lt": 1e300}}, Condition("price", None, None, Bound(1e300, False))),
        ({"live": [True, False]}, Condition("live", among=(False, True))),
        ({"tags": ["a"]}, Condition("tags", among=("a",))),
        ({"since": "1970-01-01T01:00:00+01:00"}, Condition("since", among=(0,))),
        ({"since": {"gte": "1970-01-02"}}, Condition("since", None, Bound(86_400 * NS, True))),
        ({"since": "1969-12-31T23:59:59.5Z"}, Condition("since", among=(-NS // 2,))),
        ({"until": "1970-01-03"}, Condition("until", among=(2 * 86_400 * NS,))),
        ({"never": ["a", 1]}, Condition("never", among=(1, "a"))),
        ({"never": {"gt": "a", "lt": 1}}, Condition("never", None, Bound("a", False), Bound(1, False))),
    ],
)
def test_what_a_filter_says(raw: dict, condition: Condition) -> None:
    assert parse_filter(raw, SCHEMA) == Filter((condition,))


def test_no_condition_allows_all() -> None:
    assert parse_filter({}, SCHEMA) == Filter()
    assert not Filter()


@pytest.mark.parametrize(
    ("raw", "where", "reason"),
    [
        ([], "filter", "give an object"),
        ("market", "filter", "give an object"),
        ({"markt": "de"}, "filter.markt", "there is no such column; there are: market, language, advertiser"),
        ({"x" * 1000: "de"}, "filter." + "x" * 100, "no such column"),
        ({"place": "x"}, "filter.place", "type struct<x: int8> can't be filtered"),
        ({"market": 7}, "filter.market", "is a whole number; the column holds text"),
        ({"market": True}, "filter.market", "is true or false; the column holds text"),
        ({"market": None}, "filter.market", "must be one value; the column holds text"),
        ({"market": ["de", ["fr"]]}, "filter.market.1", "must be one value"),
        ({"market": []}, "filter.market", "the list is empty"),
        ({"market": ["x"] * (MAX_VALUES + 1)}, "filter.market", "has 1001 values; at most 1000"),
        ({"market": {}}, "filter.market", "is empty; give one of gte, gt, lte, lt, not"),
        ({"market": {"eq": "de"}}, "filter.market.eq", "there is no such operator"),
        ({"market": {"gte": "b", "lt": "b"}}, "filter.market", "no value is within"),
        ({"market": {"gt": "b", "lte": "a"}}, "filter.market", "no value is within"),
        ({"bid": {"gt": 1, "lte": 1}}, "filter.bid", "no value is within"),
        ({"bid": {"gt": 1, "gte": 1}}, "filter.bid", "give one of gte and gt"),
        ({"bid": {"gt": [1]}}, "filter.bid.gt", "must be one value"),
        ({"bid": math.nan}, "filter.bid", "finite"),
        ({"bid": {"lt": math.inf}}, "filter.bid.lt", "finite"),
        ({"bid": "1"}, "filter.bid", "is text; the column holds numbers"),
        ({"bid": {"not": [1, True]}}, "filter.bid.not.1", "is true or false; the column holds numbers"),
        ({"bid": {"not": []}}, "filter.bid.not", "the list is empty"),
        ({"advertiser": 1.5}, "filter.advertiser", "is a number; the column holds whole numbers"),
        ({"live": 1}, "filter.live", "is a whole number; the column holds true and false"),
        ({"live": {"gt": False}}, "filter.live.gt", "holds true and false, which no range fits"),
        ({"tags": {"gte": "a"}}, "filter.tags.gte", "holds lists, which no range fits"),
        ({"tags": {"not": 1}}, "filter.tags.not", "the column holds text"),
        ({"since": "yesterday"}, "filter.since", "must be a time such as 2026-01-31T12:00:00Z"),
        ({"since": 0}, "filter.since", "is a whole number; the column holds times"),
        ({"until": "2026-01-31T00:00"}, "filter.until", "must be a date such as 2026-01-31"),
        ({"never": [math.nan]}, "filter.never.0", "finite"),
    ],
)
def test_what_is_refused_and_why(raw: Any, where: str, reason: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse_filter(raw, SCHEMA)
    assert [at for at, _ in refused.value.errors] == [where]
    assert reason in refused.value.errors[0][1]


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(
        FilterError, match=r"filter\.bid: is text.*; filter\.market\.0: is a whole"
    ) as refused:
        parse_filter({"market": [1, "x", 2], "bid": "x", "live": True}, SCHEMA)
    assert len(refused.value.errors) == 3


def test_too_many_columns() -> None:
    with pytest.raises(FilterError, match="names 21 columns; at most 20"):
        parse_filter({f"c{i}": 1 for i in range(MAX_COLUMNS + 1)}, SCHEMA)


def test_phrases_without_columns_say_so() -> None:
    with pytest.raises(FilterError, match="the phrases have no columns to filter by"):
        parse_filter({"market": "de"}, pa.schema([]))


def test_filters_that_say_the_same_are_one_key() -> None:
    one = parse_filter({"market": ["de", "at"], "bid": {"gte": 1, "not": 2.0}}, SCHEMA)
    same = parse_filter({"bid": {"not": [2, 2], "gte": 1.0}, "market": ["at", "de", "at"]}, SCHEMA)
    other = parse_filter({"market": ["de", "at"], "bid": {"gt": 1, "not": 2}}, SCHEMA)
    assert {one: "found"}[same] == "found"
    assert one != other


leaves = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["", "a", "2026-01-31"])
)
values = leaves | st.lists(leaves, max_size=3)
operators = st.sampled_from(["gte", "gt", "lte", "lt", "not", "eq"])
conditions = values | st.dictionaries(operators, values, max_size=3)
VALID = jsonschema_rs.validator_for(filter_schema())


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from([*SCHEMA.names, "markt"]), conditions, max_size=2))
def test_the_schema_takes_all_that_is_taken(raw: dict) -> None:
    try:
        parsed = parse_filter(raw, SCHEMA)
    except FilterError:
        return
    assert hash(parsed) == hash(parse_filter(raw, SCHEMA))
    # A column without any value takes values of different sorts at once, which no one has a use for.
    if "never" not in raw:
        assert VALID.is_valid(raw)


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {"c": None},
        {"c": []},
        {"c": ["a", 1]},
        {"c": {}},
        {"c": {"eq": 1}},
        {"c": {"gt": True}},
        {"c": {"gt": 1, "gte": 1}},
        {"c": {"lt": 1, "lte": 1}},
        {"c": {"gt": 1, "lt": "a"}},
        {"c": {"not": None}},
        {"c": {"not": []}},
        {"c": ["a"] * (MAX_VALUES + 1)},
        {f"c{i}": 1 for i in range(MAX_COLUMNS + 1)},
    ],
)
def test_the_schema_refuses_what_no_column_takes(raw: Any) -> None:
    assert not VALID.is_valid(raw)
    assert VALID.is_valid({"c": {"gte": 1, "lt": 2, "not": [1, 2]}, "d": {"not": True}, "e": ["a"]})
