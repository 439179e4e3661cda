"""The columns of live phrases: checked as they come, and as Arrow, as the bundle's are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

import pyarrow as pa

from export.bundle.lookup import MATCH_TYPE
from service.rules.negatives import NEGATIVE_KEYWORDS, keywords_of

MAX_TEXT = 1000
_ALWAYS = {MATCH_TYPE: pa.string(), NEGATIVE_KEYWORDS: pa.list_(pa.string())}


def with_rules(schema: pa.Schema) -> pa.Schema:
    """The columns that phrases can have beside a bundle's own: how they were bought, and what hides them."""
    more = [pa.field(name, kind) for name, kind in _ALWAYS.items() if name not in schema.names]
    return pa.schema([*schema, *more])


def problems_of(columns: Mapping[str, Any], schema: pa.Schema) -> list[tuple[str, str]]:
    """What is wrong with the columns of a live phrase, as (column, reason); nothing where all is well."""
    wrong = []
    for name, value in columns.items():
        if name not in schema.names:
            there = ", ".join(schema.names) or "none"
            wrong.append((name, f"there is no such column; there are: {there}"))
            continue
        try:
            _convert(_spelled(name, value, schema.field(name).type), schema.field(name).type)
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            wrong.append((name, str(error)[:200]))
    return wrong


def to_table(columns: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """The columns of n phrases as a table of `schema`, dictionaries decoded.

    A value that no longer fits, for another bundle has another column of that name, is null.
    """
    arrays = []
    fields = []
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        fields.append(pa.field(field.name, kind))
        given = [_spelled(field.name, one.get(field.name), kind) for one in columns]
        arrays.append(pa.array([_or_none(value, kind) for value in given], kind))
    return pa.table(arrays, schema=pa.schema(fields)) if fields else pa.table({}).slice(0, len(columns))


def _or_none(value: Any, kind: pa.DataType) -> Any:
    try:
        return _convert(value, kind)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        return None


def _spelled(name: str, value: Any, kind: pa.DataType) -> Any:
    """Negative keywords as the column has them: a list, or one text with commas between."""
    if name != NEGATIVE_KEYWORDS:
        return value
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if lists and isinstance(value, str):
        return keywords_of(value)
    if not lists and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ",".join(value)
    return value


def _convert(value: Any, kind: pa.DataType) -> Any:
    """The value as Arrow takes it for the type.

    Raises:
        ValueError: it is of another type.
    """
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if value is None:
        return None
    if types.is_list(kind) or types.is_large_list(kind):
        if not isinstance(value, list):
            raise ValueError("must be a list")
        return [_convert(one, kind.value_type) for one in value]
    if types.is_string(kind) or types.is_large_string(kind):
        if not isinstance(value, str):
            raise ValueError("must be text")
        return value
    if types.is_boolean(kind):
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if types.is_integer(kind) or types.is_floating(kind):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError("must be a number")
        if types.is_integer(kind) and value != int(value):
            raise ValueError("must be a whole number")
        return pa.scalar(int(value) if types.is_integer(kind) else float(value), kind).as_py()
    if types.is_timestamp(kind) or types.is_date(kind):
        if not isinstance(value, str):
            raise ValueError("must be a time such as 2026-01-31T12:00:00Z")
        moment = date.fromisoformat(value) if types.is_date(kind) else datetime.fromisoformat(value)
        pa.scalar(moment, kind)  # of years that fit the unit
        return moment
    raise ValueError(f"columns of type {kind} can't be set")
