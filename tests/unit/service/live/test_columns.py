from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from service.live.columns import problems_of, to_table, with_rules
from service.rules.negatives import NEGATIVE_KEYWORDS

TYPES = [
    pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.bool_(), pa.int8(), pa.uint8(),
    pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.date32(), pa.date64(), pa.timestamp("s"),
    pa.timestamp("ms", "UTC"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.list_(pa.string()),
    pa.list_(pa.int8()), pa.large_list(pa.timestamp("ns")), pa.list_(pa.date32()), pa.null(),
    pa.struct([("x", pa.int8())]),
]  # fmt: skip
TIMES = [
    "0001-01-01T00:00:00", "9999-12-31T23:59:59.999999", "0001-01-01T00:00:00+14:00", "2024-01-31",
    "2024-02-30", "9999-12-31T23:59:59.999999-14:00", "1677-09-21T00:12:43", "2262-04-12T00:00:00",
    "2024-01-31T12:00:00Z",
]  # fmt: skip
VALUES: list[Any] = [
    *TIMES, *([time] for time in TIMES), "", "a", "a,b", "\0", 0, 1, -1, 127, 128, 255, 256, 2**63, 2**64,
    -(2**63) - 1, 10**400, 0.5, 1e300, -0.0, 3.0, float("nan"), float("inf"), True, False, None, [], ["a"],
    [None], [1, 300], [["x"]], [0.5], {}, {"x": 1}, [{}],
]  # fmt: skip


@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_what_is_taken_can_be_held_and_what_is_not_is_null(type_: pa.DataType) -> None:
    """A phrase that is stored is read by every worker from then on, so nothing in it may stop one."""
    schema = pa.schema([("column", type_)])
    taken = 0
    for value in VALUES:
        wrong = problems_of({"column": value}, schema)
        assert [name for name, _ in wrong] in ([], ["column"])
        held = to_table([{"column": value}], schema)["column"]
        assert held[0].is_valid == (not wrong and value is not None), (value, wrong)
        taken += not wrong
    assert taken < len(VALUES)


def test_columns_that_there_are_not() -> None:
    schema = with_rules(pa.schema([("market", pa.string())]))
    assert problems_of({"market": "de", "match_type": "exact", "negative_keywords": ["a"]}, schema) == []
    ((name, reason),) = problems_of({"nothing": 1}, schema)
    assert name == "nothing"
    assert reason == "there is no such column; there are: market, match_type, negative_keywords"


def test_phrases_without_some_of_the_columns() -> None:
    schema = pa.schema([("market", pa.dictionary(pa.int8(), pa.string())), ("bid", pa.float32())])
    table = to_table([{"market": "de"}, {}, {"bid": 1, "other": 2}], schema)
    assert table.to_pydict() == {"market": ["de", None, None], "bid": [None, None, 1.0]}
    assert to_table([{"a": 1}] * 3, pa.schema([])).num_columns == 0


@pytest.mark.parametrize("value", [[["a", "b"]], [["a"], "b"], [1], ["a", {"b": 1}], {"a": 1}, 5, True])
def test_negative_keywords_that_are_none(value: Any) -> None:
    """Lists in lists among them, which would be stored and then stop all that follows the store."""
    for schema in (pa.schema([]), pa.schema([(NEGATIVE_KEYWORDS, pa.string())])):
        assert [name for name, _ in problems_of({NEGATIVE_KEYWORDS: value}, with_rules(schema))] == [
            NEGATIVE_KEYWORDS
        ]


@pytest.mark.parametrize(
    "column", [pa.string(), pa.list_(pa.string()), pa.dictionary(pa.int32(), pa.string())]
)
def test_negative_keywords_as_list_or_text(column: pa.DataType) -> None:
    schema = pa.schema([(NEGATIVE_KEYWORDS, column)])
    lists = pa.types.is_list(column)
    for value in (["used", "rent out"], "used,rent out"):
        assert problems_of({NEGATIVE_KEYWORDS: value}, schema) == []
        (held,) = to_table([{NEGATIVE_KEYWORDS: value}], schema)[NEGATIVE_KEYWORDS].to_pylist()
        assert held == (["used", "rent out"] if lists else "used,rent out")


def test_a_match_type_is_one_text() -> None:
    assert problems_of({"match_type": ["exact"]}, with_rules(pa.schema([]))) == [
        ("match_type", "must be text")
    ]
