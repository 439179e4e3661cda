"""Which phrases a filter allows: columns sorted once, so that a filter of few phrases costs few steps."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from service.rules.filters import Condition, Filter, Kind, Sort, Value, kind_of
from service.rules.ranges import in_order, places
from service.rules.selection import Selection, SelectionCache, few

CACHE_BYTES = 256 << 20
# Fewer rows than this are sorted again rather than held as a segment of their own.
_SMALL_SEGMENT = 64
_LEAST_CACHE_BYTES = 1 << 18
_SHOWN_CHARS = 200
# As many are compared one by one: that is quicker than looking each code up.
_FEW_INTERVALS = 8
# As many texts are looked for one by one: that is quicker than all together.
_FEW_TEXTS = 16

_SURROGATES = re.compile("[\ud800-\udfff]")

# Sorted, disjoint intervals of codes, each with its end left out.
Intervals = list[tuple[int, int]]


class Columns:
    """The columns of L phrases, to be filtered.

    A column is read when it is first filtered by (or by `prepare`): each distinct value gets a code, 1 to n,
    in the order of values, 0 is null; codes take 1, 2 or 4 bytes a row. Rows in the order of codes, 4 bytes
    a row, follow when a filter allows few rows of the column. Several threads may call at once.

    Args:
        table: L rows; other columns than the filterable ones do no harm.
        cache_bytes: most memory for the answers to recent filters.
    """

    def __init__(self, table: pa.Table, cache_bytes: int = CACHE_BYTES):
        if table.num_rows > np.iinfo(np.int32).max:
            raise ValueError(f"{table.num_rows} rows are more than {np.iinfo(np.int32).max}")
        self._table = table
        self._cache = SelectionCache(cache_bytes)
        self._read: dict[str, _Coded | _CodedLists] = {}
        self._locks = {name: threading.Lock() for name in table.column_names}

    def __len__(self) -> int:
        return self._table.num_rows

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, for `parse_filter`."""
        return self._table.schema

    @property
    def table(self) -> pa.Table:
        """The columns themselves."""
        return self._table

    @property
    def filterable(self) -> list[str]:
        """The columns that can be filtered by."""
        return [field.name for field in self.schema if kind_of(field.type) is not None]

    @property
    def read(self) -> set[str]:
        """The columns that were filtered by so far."""
        return set(self._read)

    def prepare(self, names: Iterable[str] | None = None) -> None:
        """Read and sort these columns now, so that no request waits; None: all that can be filtered by."""
        for name in self.filterable if names is None else names:
            self._column(name).sort()

    def select(self, filter_: Filter) -> Selection:
        """The rows that meet every condition.

        Args:
            filter_: checked against these columns.
        """
        found = self._cache.get(filter_)
        if found is None:
            found = self._evaluate(filter_)
            self._cache.put(filter_, found)
        return found

    def why_not(self, filter_: Filter, row: int) -> str | None:
        """The first column whose condition the row fails, with its value there; None: the row is allowed."""
        for condition in filter_.conditions:
            at = np.array([row], np.int32)
            if not all(test.at(at)[0] for test in self._column(condition.column).tests(condition)):
                return f"{condition.column}: {self._shown(condition.column, row)}"
        return None

    def _shown(self, name: str, row: int) -> str:
        value = self._table.column(name)[row]
        if not value.is_valid:
            return "the phrase has none"
        if isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
            parts = ["none" if one is None else str(one) for one in value.as_py()]
            text = ", ".join(parts) if parts else "nothing"
        else:
            text = value.cast(pa.string()).as_py() or "empty text"
        return f"the phrase has {text[:_SHOWN_CHARS]}"

    def _column(self, name: str) -> _Coded | _CodedLists:
        found = self._read.get(name)
        if found is None:
            with self._locks[name]:
                found = self._read.get(name)
                if found is None:
                    found = self._read[name] = _read(self._table.column(name))
        return found

    def _evaluate(self, filter_: Filter) -> Selection:
        size = len(self)
        tests = [test for one in filter_.conditions for test in self._column(one.column).tests(one)]
        if not tests:
            return Selection.of_mask(np.ones(size, bool))
        tests.sort(key=lambda test: test.most)
        if tests[0].most <= few(size):
            rows = tests[0].rows()
            for test in tests[1:]:
                rows = rows[test.at(rows)]
            return Selection(size, rows=rows)
        mask = tests[0].mask()
        for test in tests[1:]:
            mask &= test.mask()
        return Selection.of_mask(mask)


@dataclass(frozen=True)
class _Test:
    """One thing that rows of a column must meet.

    Attributes:
        most: no more rows than this meet it.
        rows: those rows, int32, ascending, none twice.
        mask: whether each row meets it, bool (L,), the caller's own.
        at: whether each of the rows given meets it, bool.
    """

    most: int
    rows: Callable[[], np.ndarray]
    mask: Callable[[], np.ndarray]
    at: Callable[[np.ndarray], np.ndarray]


def _read(column: pa.ChunkedArray) -> _Coded | _CodedLists:
    kind = kind_of(column.type)
    if kind is None:
        raise ValueError(f"columns of type {column.type} can't be filtered")
    if not kind.many:
        return _Coded(*_codes(column, kind))
    lists = column.cast(pa.large_list(column.type.value_type))
    flat = pa.chunked_array([chunk.flatten() for chunk in lists.chunks], lists.type.value_type)
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.r_[0, np.cumsum(counts, dtype=np.int64)]
    return _CodedLists(*_codes(flat, kind), offsets)


@dataclass(frozen=True)
class _Values:
    """The distinct values of a column in ascending order; the i-th has code i + 1."""

    held: Any  # an Arrow array of text, or a NumPy array
    kind: Kind

    def __len__(self) -> int:
        return len(self.held)

    def _at(self, place: int) -> Any:
        if self.kind.sort is Sort.TEXT:
            return self.held[place].as_py()
        # In Python's own numbers no comparison overflows or rounds.
        return self.held[place].item() * self.kind.ns

    def intervals(self, condition: Condition, *, excluding: bool) -> Intervals:
        """The codes that meet a condition: its exclusions too, if `excluding`, else all but these."""
        if condition.among is not None:
            return self._codes_of(condition.among)
        if condition.low is None and condition.high is None:
            start, end = 0, len(self) + 1
        elif self.kind.sort is Sort.NOTHING:
            start = end = 1
        else:
            start, end = 1, len(self) + 1
            if condition.low is not None:
                start += self._place(condition.low.value, after=not condition.low.inside)
            if condition.high is not None:
                end = 1 + self._place(condition.high.value, after=condition.high.inside)
        found: Intervals = []
        for first, last in self._codes_of(condition.excluded) if excluding else []:
            if start < min(first, end):
                found.append((start, min(first, end)))
            start = max(start, last)
        if start < end:
            found.append((start, end))
        return found

    def excluded(self, condition: Condition) -> Intervals:
        """The codes of the values that the condition excludes."""
        return self._codes_of(condition.excluded)

    def _place(self, value: Value, *, after: bool) -> int:
        bisect = bisect_right if after else bisect_left
        return bisect(range(len(self)), value, key=self._at)

    def _codes_of(self, values: tuple[Value, ...]) -> Intervals:
        """The codes of those values that there are; `values` ascend."""
        if self.kind.sort is Sort.NOTHING:
            return []
        if self.kind.sort is Sort.TEXT and len(values) > _FEW_TEXTS:
            found = _codes_of_texts(self.held, values)
        else:
            found = []
            for value in values:
                place = self._place(value, after=False)
                if place < len(self) and self._at(place) == value:
                    found.append(place + 1)
        merged: Intervals = []
        for code in found:
            if merged and merged[-1][1] == code:
                merged[-1] = (merged[-1][0], code + 1)
            else:
                merged.append((code, code + 1))
        return merged


def _codes_of_texts(held: pa.Array, values: tuple[Value, ...]) -> list[int]:
    """The codes of those texts that are held, in their order, all looked for at once."""
    # No text of a column has a lone surrogate, and Arrow takes none.
    asked = pa.array([value for value in values if not _SURROGATES.search(str(value))], pa.large_string())
    low, high = np.zeros(len(asked), np.int64), np.full(len(asked), len(held))
    for _ in range(len(held).bit_length()):
        middle = (low + high) >> 1
        at = held.take(pa.array(np.minimum(middle, len(held) - 1)))
        less = pc.less(at, asked).to_numpy(zero_copy_only=False) & (low < high)
        low, high = np.where(less, middle + 1, low), np.where(less, high, np.minimum(middle, high))
    there = low < len(held)
    if not there.any():
        return []
    equal = pc.equal(held.take(pa.array(np.minimum(low, len(held) - 1))), asked)
    codes: list[int] = (low[equal.to_numpy(zero_copy_only=False) & there] + 1).tolist()
    return codes


def _codes(column: pa.ChunkedArray, kind: Kind) -> tuple[np.ndarray, _Values]:
    """Each value's code, uint8, uint16 or int32, and the distinct values."""
    if kind.sort is Sort.NOTHING:
        return np.zeros(len(column), np.uint8), _Values(np.empty(0, np.int64), kind)
    stored = column
    if pa.types.is_dictionary(stored.type):
        stored = stored.cast(stored.type.value_type)
    if pa.types.is_date32(stored.type):
        stored = stored.cast(pa.int32())
    stored = stored.cast(kind.storage)
    if kind.sort is Sort.NUMBER:
        # NaN equals nothing, and the sum makes the two zeros one.
        stored = pc.add(pc.if_else(pc.is_nan(stored), pa.scalar(None, pa.float64()), stored), 0.0)
    # As one array: of each chunk, Arrow would hand out all values met so far again.
    encoded = pa.concat_arrays([pa.array([], kind.storage), *stored.chunks]).dictionary_encode()
    distinct = encoded.dictionary
    order = pc.sort_indices(distinct)
    ranks = np.empty(len(distinct), np.int64)
    ranks[order.to_numpy()] = np.arange(1, len(distinct) + 1)
    dtype = next(
        np.dtype(one) for one in (np.uint8, np.uint16, np.int32) if len(distinct) <= np.iinfo(one).max
    )
    # One more at the end, which the place -1 of a null finds.
    ranks = np.r_[ranks, 0].astype(dtype)
    codes = ranks[pc.fill_null(encoded.indices, -1).to_numpy()]
    values = distinct.take(order)
    return codes, _Values(values if kind.sort is Sort.TEXT else values.to_numpy(), kind)


def _between(codes: np.ndarray, first: int, last: int, count: int) -> np.ndarray:
    """Whether each code, of 0 to `count`, is at least `first` and below `last`."""
    if last == first + 1:
        return codes == first
    found = codes >= first if first > 0 else np.ones(len(codes), bool)
    if last <= count:
        found &= codes < last
    return found


def _within(codes: np.ndarray, intervals: Intervals, count: int) -> np.ndarray:
    """Whether each code, of 0 to `count`, lies in one of the intervals: bool, of the codes' shape."""
    if not intervals:
        return np.zeros(len(codes), bool)
    if len(intervals) <= _FEW_INTERVALS:
        found = _between(codes, *intervals[0], count)
        for first, last in intervals[1:]:
            found |= _between(codes, first, last, count)
        return found
    if count > 4 * len(codes) + 1024:
        starts, ends = np.array(intervals).T
        place = np.searchsorted(starts, codes, side="right") - 1
        return (place >= 0) & (codes < ends[np.maximum(place, 0)])
    table = np.zeros(count + 1, bool)
    for first, last in intervals:
        table[first:last] = True
    return table[codes]


class _Sorted:
    """Entries in the order of their codes; made when first asked for.

    Args:
        codes: (m,) of 0 to `count`.
        count: the largest code.
        offsets: row i's entries are `offsets[i]:offsets[i + 1]`; None: entry i is row i.
    """

    def __init__(self, codes: np.ndarray, count: int, offsets: np.ndarray | None):
        self._codes, self._offsets = codes, offsets
        self.starts = np.r_[0, np.cumsum(np.bincount(codes, minlength=count + 1))].astype(np.int32)
        self._order: np.ndarray | None = None
        self._sorting = threading.Lock()

    def entries(self, intervals: Intervals) -> int:
        """How many entries there are in the intervals."""
        return sum(int(self.starts[last]) - int(self.starts[first]) for first, last in intervals)

    def rows(self, intervals: Intervals) -> np.ndarray:
        """The rows of these entries, ascending, none twice: int32."""
        order = self.order()
        parts = [order[self.starts[first] : self.starts[last]] for first, last in intervals]
        if not parts:
            return np.empty(0, np.int32)
        rows = np.concatenate(parts)
        if self._offsets is not None:
            # A list may hold several of the values, and one of them several times.
            return in_order(rows)
        # The rows of one code are in order.
        return rows if sum(last - first for first, last in intervals) == 1 else np.sort(rows)

    def order(self) -> np.ndarray:
        """The row of each entry, by code and then by row: int32 (m,)."""
        if self._order is None:
            with self._sorting:
                if self._order is None:
                    pairs = self._codes.astype(np.int64) << 32
                    if self._offsets is None:
                        pairs |= np.arange(len(pairs))
                    else:
                        pairs |= np.repeat(np.arange(len(self._offsets) - 1), np.diff(self._offsets))
                    pairs.sort()
                    self._order = pairs.astype(np.uint32).view(np.int32)
        return self._order


class _Coded:
    """A column with one value a row: int codes (L,)."""

    def __init__(self, codes: np.ndarray, values: _Values):
        self._codes, self._values = codes, values
        self._sorted = _Sorted(codes, len(values), None)

    def sort(self) -> None:
        self._sorted.order()

    def tests(self, condition: Condition) -> list[_Test]:
        intervals = self._values.intervals(condition, excluding=True)
        count = len(self._values)
        return [
            _Test(
                most=self._sorted.entries(intervals),
                rows=lambda: self._sorted.rows(intervals),
                mask=lambda: _within(self._codes, intervals, count),
                at=lambda rows: _within(self._codes[rows], intervals, count),
            )
        ]


class _CodedLists:
    """A column with a list a row, row i's codes at `codes[offsets[i]:offsets[i + 1]]`."""

    def __init__(self, codes: np.ndarray, values: _Values, offsets: np.ndarray):
        self._codes, self._values, self._offsets = codes, values, offsets
        self._sorted = _Sorted(codes, len(values), offsets)

    def sort(self) -> None:
        self._sorted.order()

    def tests(self, condition: Condition) -> list[_Test]:
        tests = []
        if condition.among is not None:
            tests.append(self._holding(self._values.intervals(condition, excluding=False)))
        excluded = self._values.excluded(condition)
        if excluded:
            tests.append(_inverted(self._holding(excluded), len(self._offsets) - 1))
        return tests

    def _holding(self, intervals: Intervals) -> _Test:
        return _Test(
            most=self._sorted.entries(intervals),
            rows=lambda: self._sorted.rows(intervals),
            mask=lambda: self._mask(intervals),
            at=lambda rows: self._at(rows, intervals),
        )

    def _mask(self, intervals: Intervals) -> np.ndarray:
        mask = np.zeros(len(self._offsets) - 1, bool)
        mask[self._sorted.rows(intervals)] = True
        return mask

    def _at(self, rows: np.ndarray, intervals: Intervals) -> np.ndarray:
        counts = self._offsets[rows + 1] - self._offsets[rows]
        codes = self._codes[places(self._offsets[rows], counts)]
        held = np.r_[0, np.cumsum(_within(codes, intervals, len(self._values)))]
        ends = np.cumsum(counts)
        return held[ends] > held[ends - counts]


def _inverted(test: _Test, size: int) -> _Test:
    return _Test(
        most=size,
        rows=lambda: np.flatnonzero(~test.mask()).astype(np.int32),
        mask=lambda: ~test.mask(),
        at=lambda rows: ~test.at(rows),
    )


class GrowingColumns:
    """Columns of phrases that come one by one; up to some hundred thousand of them.

    Rows stand in a few segments, each of them `Columns` that never change; a new segment is joined with those
    before it as long as these are not twice as long, so a row is joined about log2(L) times in all, and
    what the long segments answered to a filter stays known. One thread may extend while others select.

    Args:
        schema: the columns that there are.
        cache_bytes: most memory for the answers to recent filters over all rows, and as much for those of
            the segments.
    """

    def __init__(self, schema: pa.Schema, cache_bytes: int = CACHE_BYTES >> 3):
        # A dictionary of a few rows would differ from segment to segment.
        self.schema = pa.schema([(field.name, _decoded(field.type)) for field in schema])
        # A table without columns would forget how many rows it has.
        self._held = self.schema if len(schema) else pa.schema([("", pa.null())])
        self._cache_bytes = cache_bytes
        self._cache = SelectionCache(cache_bytes)
        self._segments: tuple[Columns, ...] = ()
        self._extending = threading.Lock()

    def __len__(self) -> int:
        return sum(len(segment) for segment in self._segments)

    def extend(self, table: pa.Table) -> None:
        """Add rows at the end.

        Args:
            table: columns that the schema does not have are left out; those that are missing here are null.

        Raises:
            pa.ArrowException: a column can't be cast to the schema's type.
        """
        if not table.num_rows:
            return
        arrays = [
            table.column(field.name).cast(field.type)
            if field.name in table.column_names
            else pa.nulls(table.num_rows, field.type)
            for field in self._held
        ]
        added = pa.table(arrays, schema=self._held)
        with self._extending:
            kept = list(self._segments)
            parts = [added]
            size = added.num_rows
            while kept and (len(kept[-1]) < 2 * size or len(kept[-1]) + size <= _SMALL_SEGMENT):
                parts.insert(0, kept.pop().table)
                size += parts[0].num_rows
            joined = pa.concat_tables(parts).combine_chunks()
            # Lengths at least halve from segment to segment, and so does what their answers take.
            kept.append(Columns(joined, max(self._cache_bytes >> (len(kept) + 1), _LEAST_CACHE_BYTES)))
            self._segments = tuple(kept)

    def select(self, filter_: Filter) -> Selection:
        """The rows that meet every condition, of all that were there when this was called."""
        segments = self._segments
        size = sum(len(segment) for segment in segments)
        found = self._cache.get(filter_)
        if found is None or found.size != size:
            found = _together([segment.select(filter_) for segment in segments], size)
            self._cache.put(filter_, found)
        return found

    def why_not(self, filter_: Filter, row: int) -> str | None:
        """The first column whose condition the row fails, with its value there; None: the row is allowed."""
        for segment in self._segments:
            if row < len(segment):
                return segment.why_not(filter_, row)
            row -= len(segment)
        raise IndexError(f"there is no row {row} beyond the last")


def _decoded(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_list(type_) and pa.types.is_dictionary(type_.value_type):
        return pa.list_(type_.value_type.value_type)
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _together(parts: list[Selection], size: int) -> Selection:
    starts = np.cumsum([0, *(part.size for part in parts)])
    if sum(part.count for part in parts) <= few(size):
        rows = [part.rows() + np.int32(start) for part, start in zip(parts, starts, strict=False)]
        return Selection(size, rows=np.concatenate([np.empty(0, np.int32), *rows]))
    return Selection(size, mask=np.concatenate([part.mask() for part in parts]))
