"""Gathers rows from all readers: normalises distinct strings, applies the bad-lines policy, counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.errors import InputError
from bidmatch.base.reports import is_empty
from bidmatch.base.strings import key_array, normalise_array
from trainer.data.keywords import match_type_name
from trainer.data.labels import Labels
from trainer.data.numbers import parse_number
from trainer.data.options import ReadOptions

SKIP_HINT = "Correct the line, or pass --bad-lines skip to leave such lines out and count them."
ALL_BAD_HINT = (
    "All lines of the file are bad, so --bad-lines skip would leave it out: correct it or remove it."
)
MAX_WEIGHT = 1e15
_BAD = "bad line: "


@dataclass(frozen=True)
class Batch:
    """Some rows of a log, unnormalised.

    Attributes:
        queries: string (or dictionary of string) array, length n; null reads as empty.
        phrases: the same for phrases.
        weights: float64 (n,); NaN where missing.
        lines: int64 (n,), 1-based line or row number of each in its file.
        match_types: canonical match types, or None where the format has none.
        ids: the data's own id of each phrase ("" for none), or None where it has none.
        extras: further phrase columns by name.
    """

    queries: pa.Array
    phrases: pa.Array
    weights: np.ndarray
    lines: np.ndarray
    match_types: pa.Array | None = None
    ids: pa.Array | None = None
    extras: Mapping[str, pa.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class NumberedPairs:
    """Checked pairs of queries and numbered labels, four bytes a pair (twelve with weights).

    Attributes:
        labels: what the numbers refer to.
        part: 0 training (or undivided), 1 test.
        queries: string array (n,), key of each row's query; may repeat.
        counts: int32 (n,), labels of each row, at least 1.
        numbers: int32 (pairs,), labels of all rows one after another.
        weights: float64 (pairs,), above 0; None where each pair counts one.
    """

    labels: Labels
    part: int
    queries: pa.Array
    counts: np.ndarray
    numbers: np.ndarray
    weights: np.ndarray | None


@dataclass(frozen=True)
class NumberedFilter:
    """Pairs to take out of rankings.

    Attributes:
        labels: what the numbers refer to.
        part: the part whose rankings they are taken out of.
        queries: string array (n,), key of each row's query; may repeat.
        counts: int32 (n,), labels of each row, at least 1.
        numbers: int32 (pairs,), labels of all rows one after another.
    """

    labels: Labels
    part: int
    queries: pa.Array
    counts: np.ndarray
    numbers: np.ndarray


# What stands for a text in a column of numbers that is none.
_NO_NUMBER = "nan"


def _numbers(cells: pa.Array) -> pa.Array:
    """Numbers in one spelling, empty ones as the empty string."""
    return pa.array([_number(cell) for cell in cells.to_pylist()], pa.large_string())


def _number(cell: str) -> str:
    if is_empty(cell):
        return ""
    number = parse_number(cell, whole=False)
    return _NO_NUMBER if number is None or math.isinf(number) else repr(number)


def _match_types(cells: pa.Array) -> pa.Array:
    return pa.array([match_type_name(cell) for cell in cells.to_pylist()], pa.large_string())


def _encode(values: pa.Array, transform: Callable[[pa.Array], pa.Array] | None) -> pa.DictionaryArray:
    """Dictionary of distinct transformed strings; nulls become the empty string."""
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    distinct = encoded.dictionary.cast(pa.large_string())
    indices = encoded.indices
    if indices.null_count:
        indices = pc.fill_null(indices.cast(pa.int32()), len(distinct))
        distinct = pa.concat_arrays([distinct, pa.array([""], pa.large_string())])
    if distinct.null_count:
        distinct = pc.fill_null(distinct, "")
    changed = (distinct if transform is None else transform(distinct)).dictionary_encode()
    codes = changed.indices.to_numpy()[indices.to_numpy()]
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), changed.dictionary)


def _nothing(rows: int) -> pa.Array:
    return pa.array([""], pa.large_string()).take(pa.array(np.zeros(rows, dtype=np.int32)))


def _holds(column: pa.DictionaryArray, text: str) -> np.ndarray:
    return pc.equal(column.dictionary, text).to_numpy(zero_copy_only=False)[column.indices.to_numpy()]


class Collector:
    """Rows of all files, dictionary-encoded, 18 bytes each plus their distinct strings; fewer where numbered.

    Attributes:
        rows: data rows seen.
        skipped: reason -> rows left out.
        queries: chunks of dictionary arrays of query keys.
        texts: the same of normalised phrase texts.
        match_types: the same of match types ("" for none).
        ids: the same of the data's own phrase ids ("" for none).
        weights: float64 chunks, all > 0.
        parts: int8 chunks: 0 training (or undivided), 1 test.
        extras: chunks by column name.
        numbered: pairs that refer to label lists by number, apart from the chunks above.
        filters: pairs that the data's filter files name.
    """

    def __init__(self, options: ReadOptions):
        self.options = options
        self.rows = 0
        self.skipped: Counter[str] = Counter()
        self.queries: list[pa.DictionaryArray] = []
        self.texts: list[pa.DictionaryArray] = []
        self.match_types: list[pa.DictionaryArray] = []
        self.ids: list[pa.DictionaryArray] = []
        self.weights: list[np.ndarray] = []
        self.parts: list[np.ndarray] = []
        self.extras: dict[str, list[pa.DictionaryArray]] = {name: [] for name in options.phrase_columns}
        self.numbered: list[NumberedPairs] = []
        self.filters: list[NumberedFilter] = []

    @property
    def bad_lines(self) -> int:
        """Rows left out as bad lines."""
        return sum(count for reason, count in self.skipped.items() if reason.startswith(_BAD))

    def leave_out(self, reason: str, rows: int = 1) -> None:
        """Count rows that are no pair and no mistake either, such as a report's total line."""
        self.rows += rows
        self.skipped[reason] += rows

    def bad(self, reason: str, file: Path, line: int, hint: str | None = None) -> None:
        """One bad line: counted under `skip`.

        Raises:
            InputError: under `stop`.
        """
        if self.options.bad_lines == "stop":
            raise InputError(reason, file=file, line=line, hint=hint or SKIP_HINT)
        self.rows += 1
        self.skipped[f"{_BAD}{reason}"] += 1

    def bad_rows(self, reason: str, file: Path, lines: Sequence[int], first: str | None = None) -> None:
        """Bad lines of one kind, in order: counted under `skip`.

        Args:
            reason: what is wrong with all of them.
            file: where they stand.
            lines: which they are.
            first: what is wrong with the first of them, where that can be said more exactly.

        Raises:
            InputError: there is one, under `stop`.
        """
        if not len(lines):
            return
        if self.options.bad_lines == "stop":
            self.bad(first or reason, file, int(lines[0]))
        self.leave_out(f"{_BAD}{reason}", len(lines))

    def extend(self, other: Collector) -> None:
        """Take over all that another collector with the same options holds."""
        self.rows += other.rows
        self.skipped.update(other.skipped)
        for name in ("queries", "texts", "match_types", "ids", "weights", "parts", "numbered", "filters"):
            getattr(self, name).extend(getattr(other, name))
        for name, chunks in other.extras.items():
            self.extras[name].extend(chunks)

    def spell_out(self) -> None:
        """Turn numbered pairs into ordinary ones, so that they can be merged with those of other files."""
        numbered, self.numbered = self.numbered, []
        for pairs in numbered:
            queries = pairs.queries.dictionary_encode().take(
                pa.array(np.repeat(np.arange(len(pairs.counts)), pairs.counts))
            )
            used, codes = np.unique(pairs.numbers, return_inverse=True)
            texts = pairs.labels.texts.take(pa.array(used))
            batch = Batch(
                queries,
                pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), texts),
                np.ones(len(codes)) if pairs.weights is None else pairs.weights,
                np.zeros(len(codes), dtype=np.int64),
            )
            # Rows were counted when they were read.
            rows = self.rows
            self.add(batch, pairs.labels.path, pairs.part)
            self.rows = rows

    def add(self, batch: Batch, file: Path, part: int = 0) -> None:
        """Take the batch's good rows.

        Raises:
            InputError: a row is bad and bad lines stop; names the first such row.
        """
        queries = _encode(batch.queries, key_array)
        texts = _encode(batch.phrases, normalise_array)
        weights = batch.weights
        extras = self._extras_of(batch)
        keep = np.ones(len(weights), dtype=bool)
        faults = (
            ("the query is empty", _holds(queries, "")),
            ("the phrase is empty", _holds(texts, "")),
            ("the weight is missing", np.isnan(weights)),
            ("the weight is negative", weights < 0),
            (f"the weight is above {MAX_WEIGHT:.0e}", weights > MAX_WEIGHT),
            *(
                (f"{name} is not a number", _holds(extras[name], _NO_NUMBER))
                for name in self.options.number_columns
            ),
        )
        if self.options.bad_lines == "stop":
            first = [(int(np.argmax(fault)), reason) for reason, fault in faults if fault.any()]
            if first:
                row, reason = min(first)
                raise InputError(reason, file=file, line=int(batch.lines[row]), hint=SKIP_HINT)
        for reason, fault in faults:
            self._drop(keep, fault, f"{_BAD}{reason}")
        with np.errstate(over="ignore", under="ignore"):
            self._drop(keep, weights.astype(np.float32) == 0, f"weight is 0 (no {self.options.weight})")
        self.rows += len(weights)
        self._append(batch, queries, texts, extras, keep, part)

    def _extras_of(self, batch: Batch) -> dict[str, pa.DictionaryArray]:
        none, numbers = _nothing(len(batch.weights)), self.options.number_columns
        return {
            name: _encode(batch.extras.get(name, none), _numbers if name in numbers else normalise_array)
            for name in self.extras
        }

    def _drop(self, keep: np.ndarray, fault: np.ndarray, reason: str) -> None:
        fault = fault & keep
        if fault.any():
            self.skipped[reason] += int(fault.sum())
            keep &= ~fault

    def _append(
        self,
        batch: Batch,
        queries: pa.DictionaryArray,
        texts: pa.DictionaryArray,
        extras: dict[str, pa.DictionaryArray],
        keep: np.ndarray,
        part: int,
    ) -> None:
        count = int(keep.sum())
        if count == 0:
            return
        none = _nothing(len(keep))
        columns = {
            "match_types": _encode(none if batch.match_types is None else batch.match_types, _match_types),
            "ids": _encode(none if batch.ids is None else batch.ids, None),
            **extras,
        }
        if count < len(keep):
            mask = pa.array(keep)
            queries, texts = queries.filter(mask), texts.filter(mask)
            columns = {name: column.filter(mask) for name, column in columns.items()}
        self.queries.append(queries)
        self.texts.append(texts)
        self.match_types.append(columns.pop("match_types"))
        self.ids.append(columns.pop("ids"))
        for name, column in columns.items():
            self.extras[name].append(column)
        self.weights.append(batch.weights[keep])
        self.parts.append(np.full(count, part, dtype=np.int8))
