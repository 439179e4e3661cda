"""The `filter` of a request: checked against the phrases' columns, in one form however it was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa

MAX_COLUMNS = 20
MAX_VALUES = 1000
_SHOWN_COLUMNS = 20
_SHOWN_CHARS = 100

_LOWER, _UPPER, _NOT = ("gte", "gt"), ("lte", "lt"), "not"
_OPERATORS = (*_LOWER, *_UPPER, _NOT)

_NS_PER_DAY = 86_400 * 10**9
_NS_PER_UNIT = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LARGEST_SINGLE = float(np.finfo(np.float32).max)

Value = str | int | float | bool


class FilterError(ValueError):
    """A filter that can't be used.

    Attributes:
        errors: (where, reason) of each thing that is wrong; where is such as `filter.market.not.1`.
    """

    def __init__(self, errors: list[tuple[str, str]]):
        self.errors = errors
        super().__init__("; ".join(f"{where}: {reason}" for where, reason in errors))


class Sort(Enum):
    """What a column's values are to a filter; the value says so to people."""

    TEXT = "text"
    WHOLE = "whole numbers"
    NUMBER = "numbers"
    BOOLEAN = "true and false"
    TIME = "times"
    DATE = "dates"
    NOTHING = "no value at all"


@dataclass(frozen=True)
class Kind:
    """How a column's values compare.

    Attributes:
        sort: what one value is.
        many: a row holds a list of them.
        storage: the Arrow type to compare values in; times and dates as numbers of `ns`.
        ns: nanoseconds that one unit of a time or date is; 1 for the rest.
        single: numbers have single precision (or half), so 0.1 in a filter must mean what 0.1 became there.
    """

    sort: Sort
    many: bool
    storage: pa.DataType
    ns: int = 1
    single: bool = False


def kind_of(type_: pa.DataType) -> Kind | None:
    """How a column of this Arrow type is filtered; None where it can't be."""
    types = pa.types
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        inner = kind_of(type_.value_type)
        if inner is None or inner.many:
            return None
        return Kind(inner.sort, True, inner.storage, inner.ns, inner.single)
    if types.is_dictionary(type_):
        inner = kind_of(type_.value_type)
        return None if inner is None or inner.many else inner
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return Kind(Sort.TEXT, False, pa.large_string())
    if types.is_boolean(type_):
        return Kind(Sort.BOOLEAN, False, pa.uint8())
    if types.is_integer(type_):
        return Kind(Sort.WHOLE, False, pa.uint64() if types.is_uint64(type_) else pa.int64())
    if types.is_floating(type_):
        return Kind(Sort.NUMBER, False, pa.float64(), single=type_.bit_width < 64)
    if types.is_timestamp(type_):
        return Kind(Sort.TIME, False, pa.int64(), ns=_NS_PER_UNIT[type_.unit])
    if types.is_date32(type_):
        return Kind(Sort.DATE, False, pa.int64(), ns=_NS_PER_DAY)
    if types.is_date64(type_):
        return Kind(Sort.DATE, False, pa.int64(), ns=_NS_PER_UNIT["ms"])
    if types.is_null(type_):
        return Kind(Sort.NOTHING, False, pa.null())
    return None


@dataclass(frozen=True)
class Bound:
    """One end of a range.

    Attributes:
        value: the end.
        inside: whether the end itself is allowed.
    """

    value: Value
    inside: bool


@dataclass(frozen=True)
class Condition:
    """What one column's value must be; times and dates are nanoseconds since 1970, UTC.

    A null (or NaN) is among no values, in no range, and no excluded value either.

    Attributes:
        column: the column's name.
        among: the values of which it must be one (of a list: hold one), ascending; None: any.
        low: where its range starts, or None.
        high: where its range ends, or None.
        excluded: values that it must not be (of a list: hold), ascending.
    """

    column: str
    among: tuple[Value, ...] | None = None
    low: Bound | None = None
    high: Bound | None = None
    excluded: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Filter:
    """Conditions that must all hold, one a column, in the order of names. None of them: all is allowed.

    Equal for filters that say the same in another order, and hashable: a key for caches. Values mean
    something only to the columns that they were checked against.
    """

    conditions: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def size(self) -> int:
        """Bytes it takes in memory, roughly."""
        held = [
            value for one in self.conditions for values in (one.among or (), one.excluded) for value in values
        ]
        return 300 * (1 + len(self.conditions)) + sum(
            60 + 2 * len(value) if isinstance(value, str) else 40 for value in held
        )


def parse_filter(raw: Any, schema: pa.Schema) -> Filter:
    """The checked form of a request's `filter`.

    Args:
        raw: what the request has, as JSON gives it: `{column: value | [values] | {"gte", "gt", "lte", "lt":
            value, "not": value | [values]}}`.
        schema: the columns that there are.

    Raises:
        FilterError: it asks for columns, values or operators that there are not, or contradicts itself.
    """
    if not isinstance(raw, dict):
        raise FilterError([("filter", "give an object with a condition for each column")])
    if len(raw) > MAX_COLUMNS:
        raise FilterError([("filter", f"names {len(raw)} columns; at most {MAX_COLUMNS} are taken")])
    errors: list[tuple[str, str]] = []
    conditions = []
    for name in sorted(raw):
        where = f"filter.{name[:_SHOWN_CHARS]}"
        index = schema.get_field_index(name)
        if index < 0:
            errors.append((where, f"there is no such column; {_listed(schema)}"))
            continue
        type_ = schema.field(index).type
        kind = kind_of(type_)
        if kind is None:
            errors.append((where, f"columns of type {str(type_)[:_SHOWN_CHARS]} can't be filtered"))
            continue
        before = len(errors)
        condition = _Reader(kind, errors).condition(where, name, raw[name])
        if len(errors) == before:
            conditions.append(condition)
    if errors:
        raise FilterError(errors)
    return Filter(tuple(conditions))


def _listed(schema: pa.Schema) -> str:
    names = [field.name for field in schema if kind_of(field.type) is not None]
    if not names:
        return "the phrases have no columns to filter by"
    more = ", …" if len(names) > _SHOWN_COLUMNS else ""
    return "there are: " + ", ".join(names[:_SHOWN_COLUMNS]) + more


class _Reader:
    """Reads the condition on one column; what is wrong goes to `errors`."""

    def __init__(self, kind: Kind, errors: list[tuple[str, str]]):
        self._kind = kind
        self._errors = errors

    def condition(self, where: str, name: str, raw: Any) -> Condition:
        if not isinstance(raw, dict):
            return Condition(name, among=self._values(where, raw))
        if not raw:
            self._errors.append((where, f"is empty; give one of {', '.join(_OPERATORS)}"))
        for operator in raw:
            if operator not in _OPERATORS:
                self._errors.append(
                    (
                        f"{where}.{operator[:_SHOWN_CHARS]}",
                        f"there is no such operator; there are: {', '.join(_OPERATORS)}",
                    )
                )
        low = self._bound(where, raw, _LOWER)
        high = self._bound(where, raw, _UPPER)
        if low is not None and high is not None and self._kind.sort is not Sort.NOTHING:
            crossed: bool = low.value > high.value  # type: ignore[operator]
            if crossed or (low.value == high.value and not (low.inside and high.inside)):
                self._errors.append((where, "no value is within this range"))
        excluded = self._values(f"{where}.{_NOT}", raw[_NOT]) if _NOT in raw else ()
        return Condition(name, low=low, high=high, excluded=excluded)

    def _bound(self, where: str, raw: dict[str, Any], operators: tuple[str, str]) -> Bound | None:
        given = [operator for operator in operators if operator in raw]
        if not given:
            return None
        if self._kind.many or self._kind.sort is Sort.BOOLEAN:
            has = "lists" if self._kind.many else self._kind.sort.value
            self._errors.append((f"{where}.{given[0]}", f"the column holds {has}, which no range fits"))
            return None
        if len(given) > 1:
            self._errors.append((where, f"give one of {given[0]} and {given[1]}"))
            return None
        try:
            value = _value(self._kind, raw[given[0]], whole=False)
        except ValueError as wrong:
            self._errors.append((f"{where}.{given[0]}", str(wrong)))
            return None
        return Bound(value, given[0].endswith("e"))

    def _values(self, where: str, raw: Any) -> tuple[Value, ...]:
        given = raw if isinstance(raw, list) else [raw]
        if not given:
            self._errors.append((where, "the list is empty"))
        if len(given) > MAX_VALUES:
            self._errors.append((where, f"has {len(given)} values; at most {MAX_VALUES} are taken"))
            return ()
        values: set[Value] = set()
        for at, one in enumerate(given):
            try:
                values.add(_value(self._kind, one, whole=True))
            except ValueError as wrong:
                self._errors.append((f"{where}.{at}" if isinstance(raw, list) else where, str(wrong)))
        # A column without values takes values of any sort, which don't compare.
        order: Callable[[Value], Any] | None = _any_order if self._kind.sort is Sort.NOTHING else None
        return tuple(sorted(values, key=order))


def _any_order(value: Value) -> tuple[str, str]:
    return type(value).__name__, str(value)


def _value(kind: Kind, raw: Any, *, whole: bool) -> Value:
    """A value of the column's sort.

    Args:
        kind: the column's.
        raw: what the request has.
        whole: for a column of whole numbers: whether others are refused, for they equal none.

    Raises:
        ValueError: it is of another sort; says so.
    """
    if raw is None or not isinstance(raw, str | int | float):
        raise ValueError(f"must be one value; the column holds {kind.sort.value}")
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ValueError("must be a finite number")
    if kind.sort is Sort.NOTHING:
        return raw
    if kind.sort is Sort.TEXT and isinstance(raw, str):
        return raw
    if kind.sort is Sort.BOOLEAN and isinstance(raw, bool):
        return raw
    if kind.sort in (Sort.WHOLE, Sort.NUMBER) and not isinstance(raw, str | bool):
        if kind.sort is Sort.NUMBER:
            return _single(raw) if kind.single else raw
        if not whole or raw == int(raw):
            return int(raw) if raw == int(raw) else raw
    if kind.sort is Sort.TIME and isinstance(raw, str):
        return _nanoseconds(raw)
    if kind.sort is Sort.DATE and isinstance(raw, str):
        return _days(raw) * _NS_PER_DAY
    raise ValueError(f"is {_named(raw)}; the column holds {kind.sort.value}")


def _named(raw: str | int | float | bool) -> str:
    if isinstance(raw, str):
        return "text"
    if isinstance(raw, bool):
        return "true or false"
    return "a whole number" if isinstance(raw, int) else "a number"


def _single(raw: int | float) -> int | float:
    """What a number becomes in single precision; itself where it is beyond that."""
    return raw if abs(raw) > _LARGEST_SINGLE else float(np.float32(raw))


def _nanoseconds(raw: str) -> int:
    try:
        moment = datetime.fromisoformat(raw)
    except ValueError:
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def _days(raw: str) -> int:
    try:
        return date.fromisoformat(raw).toordinal() - _EPOCH.toordinal()
    except ValueError:
        raise ValueError("must be a date such as 2026-01-31") from None


def filter_schema() -> dict[str, Any]:
    """JSON Schema of a filter on any columns; which there are, and of which sort, is the phrases' matter."""
    sorts = ("string", "number", "boolean")
    one: list[dict[str, Any]] = [{"type": sort} for sort in sorts]
    several: list[dict[str, Any]] = [
        {"type": "array", "items": {"type": sort}, "minItems": 1, "maxItems": MAX_VALUES} for sort in sorts
    ]
    # Each pair of ends spelled out: what makes clients from schemas seldom knows of `not`.
    ranges: list[dict[str, Any]] = [
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": False,
            "properties": {
                low: {"type": sort},
                high: {"type": sort},
                _NOT: {"anyOf": [{"type": sort}, several[at]]},
            },
        }
        for at, sort in enumerate(("string", "number"))
        for low, high in product(_LOWER, _UPPER)
    ]
    excluding: dict[str, Any] = {
        "type": "object",
        "required": [_NOT],
        "additionalProperties": False,
        "properties": {_NOT: {"anyOf": [{"type": "boolean"}, several[2]]}},
    }
    return {
        "type": "object",
        "maxProperties": MAX_COLUMNS,
        "description": "only phrases whose columns meet every condition: a value (equal; of a list: holds "
        "it), several (one of them), or a range and values that it must not be. Times and dates are ISO 8601 "
        "texts, UTC where they name no offset. A phrase without a value meets no condition but `not`.",
        "additionalProperties": {"anyOf": [*one, *several, *ranges, excluding]},
        "example": {"market": ["de", "at"], "bid": {"gte": 0.2}, "language": {"not": "fr"}},
    }
