from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.rules.columns import Columns, GrowingColumns
from service.rules.filters import parse_filter
from service.rules.selection import Selection, SelectionCache, few

POOLS: dict[str, list[Any]] = {
    "market": ["", "a", "A", "ab", "é", "日本", "\U0001f600", "\uffff"],
    "language": ["", "a", "b", "é"],
    "advertiser": [-(2**31), -1, 0, 1, 2**31 - 1],
    "big": [0, 1, 2**53 + 1, 2**64 - 1],
    "bid": [-1.5, -0.0, 0.0, 0.1, 2.0**60, math.inf, math.nan],
    "price": [float(np.float32(value)) for value in (0.0, 0.1, 0.2, 3.0)],
    "live": [False, True],
    "since": [datetime(2026, 1, day, 12, tzinfo=UTC) for day in (1, 2, 3)],
    "until": [date(1969, 12, 31), date(1970, 1, 1), date(2026, 1, 31)],
    "never": [],
}
TYPES = {
    "market": pa.string(),
    "language": pa.dictionary(pa.int8(), pa.string()),
    "advertiser": pa.int32(),
    "big": pa.uint64(),
    "bid": pa.float64(),
    "price": pa.float32(),
    "live": pa.bool_(),
    "since": pa.timestamp("us", "UTC"),
    "until": pa.date32(),
    "never": pa.null(),
    "tags": pa.list_(pa.string()),
}
SCHEMA = pa.schema(TYPES)
ORDERED = [name for name in POOLS if name not in ("live", "never")]


def asked(value: Any) -> Any:
    """A value of a column as a request would write it."""
    return value.isoformat() if isinstance(value, date) else value


def plain(value: Any) -> Any:
    """A value of a column or a request, as one compares it."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and math.isnan(value):
        return None
    return asked(value)


def meets(value: Any, condition: Any, name: str) -> bool:
    """Whether a value meets a request's condition on its column: the plain rules."""
    held = (
        [plain(one) for one in (value if isinstance(value, list) else [value])] if value is not None else []
    )
    held = [one for one in held if one is not None]

    def among(values: Any) -> bool:
        return any(
            one == plain(other)
            for one in held
            for other in (values if isinstance(values, list) else [values])
        )

    if not isinstance(condition, dict):
        return among(condition)
    for operator, bound in condition.items():
        if operator == "not":
            if among(bound):
                return False
            continue
        compare = {
            "gte": lambda one, other: one >= other,
            "gt": lambda one, other: one > other,
            "lte": lambda one, other: one <= other,
            "lt": lambda one, other: one < other,
        }[operator]
        if not held or not compare(held[0], plain(bound)):
            return False
    return True


tags = st.none() | st.lists(st.none() | st.sampled_from(["", "a", "b", "é"]), max_size=3)
row = st.fixed_dictionaries(
    {name: st.none() | st.sampled_from(pool) if pool else st.none() for name, pool in POOLS.items()}
    | {"tags": tags}
)


def askable(name: str) -> st.SearchStrategy[Any]:
    if name == "tags":
        return st.sampled_from(["", "a", "b", "c"])
    if name == "never":
        return st.sampled_from(["a", 1, True])
    more = {"market": ["aa", "zz"], "advertiser": [7, 2**70], "big": [-1, 2.0**53], "bid": [0.05, 1, 10**400]}
    pool = [asked(value) for value in POOLS[name] + more.get(name, [])]
    return st.sampled_from([value for value in pool if not isinstance(value, float) or math.isfinite(value)])


@st.composite
def condition(draw: st.DrawFn, name: str) -> Any:
    values = st.lists(askable(name), min_size=1, max_size=3)
    if draw(st.booleans()):
        return draw(askable(name) | values)
    whole: dict[str, Any] = {}
    if name in ORDERED and draw(st.booleans()):
        ends = draw(st.lists(askable(name), min_size=1, max_size=2, unique=True))
        low, high = min(ends), max(ends)
        whole |= {draw(st.sampled_from(["gte", "gt"])): low} if draw(st.booleans()) or len(ends) == 1 else {}
        if len(ends) == 2:
            whole |= {draw(st.sampled_from(["lte", "lt"])): high}
    if not whole or draw(st.booleans()):
        whole["not"] = draw(askable(name) | values)
    return whole


@st.composite
def filters(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(list(TYPES)), max_size=3, unique=True))
    return {name: draw(condition(name)) for name in names}


def in_chunks(table: pa.Table, cuts: list[int]) -> pa.Table:
    ends = sorted({0, len(table), *(min(cut, len(table)) for cut in cuts)})
    parts = [table.slice(a, b - a) for a, b in pairwise(ends)]
    return pa.concat_tables(parts) if parts else table


def check(found: Selection, wanted: np.ndarray) -> None:
    assert found.size == len(wanted)
    assert found.count == int(wanted.sum())
    assert found.rows().tolist() == np.flatnonzero(wanted).tolist()
    assert found.mask().tolist() == wanted.tolist()
    assert (found.rows().dtype, found.mask().dtype) == (np.int32, np.bool_)


def wanted_of(rows: list[dict], raw: dict) -> np.ndarray:
    return np.array([all(meets(one[name], raw[name], name) for name in raw) for one in rows], bool)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(row, max_size=12),
    st.lists(filters(), min_size=1, max_size=4),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_agrees_with_the_plain_rules(rows: list[dict], raws: list[dict], cuts: list[int]) -> None:
    columns = Columns(in_chunks(pa.Table.from_pylist(rows, SCHEMA), cuts))
    for raw in raws:
        filter_ = parse_filter(raw, columns.schema)
        wanted = wanted_of(rows, raw)
        check(columns.select(filter_), wanted)
        for at in range(len(rows)):
            reason = columns.why_not(filter_, at)
            assert (reason is None) == wanted[at]
            assert reason is None or not meets(
                rows[at][reason.partition(":")[0]], raw[reason.partition(":")[0]], ""
            )


@settings(max_examples=100, deadline=None)
@given(st.lists(row, min_size=1, max_size=12), st.lists(filters(), min_size=1, max_size=6))
def test_agrees_with_the_plain_rules_where_many_rows_are_allowed(rows: list[dict], raws: list[dict]) -> None:
    # So many rows that a filter of a common value is answered by a mask.
    places = np.random.default_rng(0).integers(len(rows), size=40_000)
    columns = Columns(pa.Table.from_pylist(rows, SCHEMA).take(pa.array(places)))
    for raw in raws:
        wanted = wanted_of(rows, raw)[places]
        found = columns.select(parse_filter(raw, columns.schema))
        if raws.count(raw) == 1:
            assert found.held_as_rows == (wanted.sum() <= few(40_000))
        assert found.rows().tolist() == np.flatnonzero(wanted).tolist()
        assert np.array_equal(found.mask(), wanted)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(row, max_size=80), max_size=4), st.lists(filters(), min_size=1, max_size=3))
def test_growing_columns_agree_with_the_plain_rules_after_each_growth(
    parts: list[list[dict]], raws: list[dict]
) -> None:
    growing = GrowingColumns(SCHEMA)
    rows: list[dict] = []
    for part in [[], *parts]:
        growing.extend(pa.Table.from_pylist(part, SCHEMA))
        rows += part
        assert len(growing) == len(rows)
        for raw in raws:
            filter_ = parse_filter(raw, growing.schema)
            wanted = wanted_of(rows, raw)
            check(growing.select(filter_), wanted)
            assert [growing.why_not(filter_, at) is None for at in range(len(rows))] == wanted.tolist()


def test_growing_one_by_one_keeps_few_segments_and_all_rows() -> None:
    growing = GrowingColumns(pa.schema([("market", pa.string()), ("bid", pa.float64())]))
    filter_ = parse_filter({"market": "m3"}, growing.schema)
    for at in range(1500):
        growing.extend(pa.table({"market": [f"m{at % 7}"]}))
        if at % 50 == 0:
            assert growing.select(filter_).rows().tolist() == list(range(3, at + 1, 7))
    assert len(growing._segments) <= 6
    assert growing.select(filter_).count == len(range(3, 1500, 7))
    assert growing.select(parse_filter({"bid": {"not": 1}}, growing.schema)).count == 1500


def test_growing_columns_that_there_are_none_of() -> None:
    growing = GrowingColumns(pa.schema([]))
    growing.extend(pa.table({"other": [1, 2, 3]}))
    growing.extend(pa.table({"other": [1]}))
    assert len(growing) == 4
    check(growing.select(parse_filter({}, growing.schema)), np.ones(4, bool))


def test_growing_columns_take_each_type_as_the_schema_has_it() -> None:
    growing = GrowingColumns(SCHEMA)
    growing.extend(pa.table({"since": ["2026-01-01T12:00:00Z"], "advertiser": [7], "language": ["a"]}))
    for raw in ({"since": "2026-01-01T12:00:00Z"}, {"advertiser": 7}, {"language": "a"}):
        assert growing.select(parse_filter(raw, growing.schema)).count == 1
    with pytest.raises(pa.ArrowInvalid):
        growing.extend(pa.table({"advertiser": ["seven"]}))
    assert len(growing) == 1


def test_growing_columns_of_lists_of_a_dictionary() -> None:
    growing = GrowingColumns(pa.schema([("tags", pa.list_(pa.dictionary(pa.int8(), pa.string())))]))
    for tags in ([["a"]], [["b", "a"], None]):
        growing.extend(pa.table({"tags": pa.array(tags, pa.list_(pa.string()))}))
    assert growing.select(parse_filter({"tags": "a"}, growing.schema)).rows().tolist() == [0, 1]


def test_a_row_beyond_the_last_is_an_error() -> None:
    growing = GrowingColumns(SCHEMA)
    with pytest.raises(IndexError):
        growing.why_not(parse_filter({}, SCHEMA), 0)


@pytest.mark.parametrize(
    ("type_", "values", "raw", "rows"),
    [
        (pa.large_string(), ["a", None, "b"], "b", [2]),
        (pa.string_view(), ["a", None, "b"], {"not": "b"}, [0, 1]),
        (pa.int8(), [1, None, 3], {"lt": 3.5}, [0, 2]),
        (pa.float16(), [0.5, None, 2.0], {"gt": 0.5}, [2]),
        (pa.large_list(pa.string()), [["a", "a"], None, ["b", "a"]], "a", [0, 2]),
        (pa.list_(pa.string(), 2), [["a", "b"], None, ["c", "d"]], {"not": "a"}, [1, 2]),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), [["a"], None, []], ["a", "x"], [0]),
        (pa.list_(pa.null()), [[None], None, []], {"not": "a"}, [0, 1, 2]),
        (pa.list_(pa.int16()), [[1, 2], None, [2]], [1, 3], [0]),
        (pa.dictionary(pa.int32(), pa.int64()), [5, None, 6], {"gte": 6}, [2]),
        (pa.timestamp("s"), [datetime(2026, 1, 1), None, datetime(2026, 1, 2)], "2026-01-02", [2]),
        (pa.timestamp("ns"), [datetime(2026, 1, 1), None, datetime(2026, 1, 2)], {"lt": "2026-01-02"}, [0]),
        (pa.date64(), [date(2026, 1, 1), None, date(2026, 1, 2)], {"gt": "2026-01-01"}, [2]),
    ],
)
def test_other_types_of_columns(type_: pa.DataType, values: list, raw: Any, rows: list[int]) -> None:
    columns = Columns(pa.table({"c": pa.array(values, type_)}))
    filter_ = parse_filter({"c": raw}, columns.schema)
    assert columns.select(filter_).rows().tolist() == rows
    assert [at for at in range(3) if columns.why_not(filter_, at) is None] == rows


def test_dictionaries_with_repeated_unused_and_null_values() -> None:
    dictionary = pa.DictionaryArray.from_arrays(
        pa.array([0, 2, 1, None, 4]), pa.array(["b", "x", "b", "unused", None])
    )
    columns = Columns(pa.table({"c": dictionary}))
    assert columns.select(parse_filter({"c": "b"}, columns.schema)).rows().tolist() == [0, 1]
    assert columns.select(parse_filter({"c": {"not": "b"}}, columns.schema)).rows().tolist() == [2, 3, 4]


@pytest.mark.parametrize("distinct", [255, 256, 65_535, 65_536])
def test_as_many_values_as_a_width_of_codes_holds(distinct: int) -> None:
    values = np.random.default_rng(1).permutation(distinct)
    columns = Columns(pa.table({"c": pa.array([None, *values.tolist()])}))
    for value in (0, distinct - 1):
        found = columns.select(parse_filter({"c": value}, columns.schema))
        assert found.rows().tolist() == [1 + int(np.flatnonzero(values == value)[0])]
    assert columns.select(parse_filter({"c": {"gte": 0}}, columns.schema)).count == distinct
    assert columns.select(parse_filter({"c": {"not": [0, 1]}}, columns.schema)).count == distinct - 1


@pytest.mark.parametrize("distinct", [20, 5_000, 30_000])
@pytest.mark.parametrize("text", [False, True])
def test_many_values_at_once(distinct: int, text: bool) -> None:
    rng = np.random.default_rng(distinct)
    held = rng.permutation(np.arange(40_000) % distinct) * 3
    asked_for = rng.integers(3 * distinct, size=(4, 900))
    market = np.arange(40_000) % 400

    def written(values: np.ndarray) -> list:
        # Some that no column can hold.
        return [f"é{value}" for value in values.tolist()] + ["\ud800", "é\udfff"] if text else values.tolist()

    columns = Columns(pa.table({"c": written(held)[:40_000], "market": market}))
    for values in asked_for:
        meets = np.isin(held, values)
        for raw, wanted in (
            ({"c": written(values)}, meets),
            ({"c": {"not": written(values)}}, ~meets),
            ({"c": {"not": written(values)}, "market": 7}, ~meets & (market == 7)),
            ({"c": written(values), "market": [7, 9]}, meets & np.isin(market, [7, 9])),
        ):
            found = columns.select(parse_filter(raw, columns.schema))
            assert np.array_equal(found.rows(), np.flatnonzero(wanted))


def test_why_a_row_is_left_out() -> None:
    table = pa.table(
        {
            "market": ["de", "", None],
            "tags": [["a", None], [], None],
            "since": pa.array([0, 1, 2], pa.timestamp("ns")),
        }
    )
    columns = Columns(table)

    def reasons(raw: dict) -> list[str | None]:
        return [columns.why_not(parse_filter(raw, columns.schema), at) for at in range(3)]

    assert reasons({"market": "fr"}) == [
        "market: the phrase has de",
        "market: the phrase has empty text",
        "market: the phrase has none",
    ]
    assert reasons({"tags": "b"}) == [
        "tags: the phrase has a, none",
        "tags: the phrase has nothing",
        "tags: the phrase has none",
    ]
    assert reasons({"since": {"gt": "1970-01-01"}}) == [
        "since: the phrase has 1970-01-01 00:00:00.000000000",
        None,
        None,
    ]


def test_columns_that_cannot_be_filtered_do_no_harm() -> None:
    columns = Columns(pa.table({"market": ["de"], "place": [{"x": 1}]}))
    columns.prepare()
    assert columns.select(parse_filter({"market": "de"}, columns.schema)).count == 1


def test_many_threads_at_once() -> None:
    rng = np.random.default_rng(0)
    markets = rng.integers(50, size=50_000)
    columns = Columns(
        pa.table({"market": markets, "tags": [[f"t{value % 5}"] for value in markets.tolist()]})
    )
    raws = [{"market": {"lt": int(bound)}, "tags": {"not": "t0"}} for bound in rng.integers(1, 50, size=200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda raw: columns.select(parse_filter(raw, columns.schema)).rows(), raws))
    for raw, rows in zip(raws, found, strict=True):
        bound = raw["market"]["lt"]  # type: ignore[index]
        assert np.array_equal(rows, np.flatnonzero((markets < bound) & (markets % 5 != 0)))


def test_an_equal_filter_is_answered_from_memory_and_never_changed_by_who_got_it() -> None:
    columns = Columns(pa.table({"market": ["de", "fr"] * 4000}))
    one = columns.select(parse_filter({"market": ["de", "at"]}, columns.schema))
    assert columns.select(parse_filter({"market": ["at", "de"]}, columns.schema)) is one
    for held in (one.rows(), one.mask()):
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 0


def test_the_cache_stays_within_its_bytes_and_drops_the_least_recently_used() -> None:
    schema = pa.schema([("c", pa.int64())])
    filters_ = [parse_filter({"c": value}, schema) for value in range(5)]
    cache = SelectionCache(50_000)

    def selection() -> Selection:
        return Selection(16_000, rows=np.zeros(3_000, np.int32))

    for filter_ in filters_[:3]:
        cache.put(filter_, selection())
    assert len(cache) == 3
    assert cache.get(filters_[0]) is not None
    cache.put(filters_[3], selection())
    assert [cache.get(one) is not None for one in filters_[:4]] == [True, False, True, True]
    assert cache.nbytes <= 50_000
    grown = cache.get(filters_[3])
    assert grown is not None
    grown.mask()
    assert 28_000 < cache.nbytes <= 50_000
    assert [cache.get(one) is not None for one in filters_[:4]] == [False, False, True, True]
    cache.put(filters_[4], Selection(60_000, mask=np.ones(60_000, bool)))
    assert cache.get(filters_[4]) is None
    assert len(cache) == 2
    before = cache.nbytes
    cache.put(filters_[3], selection())
    assert cache.nbytes == before - 16_000


def test_what_was_dropped_and_grows_is_not_counted() -> None:
    schema = pa.schema([("c", pa.int64())])
    cache = SelectionCache(20_000)
    old, new = (Selection(4_000, rows=np.zeros(3_000, np.int32)) for _ in range(2))
    cache.put(parse_filter({"c": 1}, schema), old)
    cache.put(parse_filter({"c": 2}, schema), new)
    before = cache.nbytes
    old.mask()
    assert (len(cache), cache.nbytes) == (1, before)
