"""JSON lines: `{"query", "phrase"[, "weight"]}` click logs, and queries with (numbered) labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, decode_head, open_source
from trainer.data.collect import SKIP_HINT, Collector
from trainer.data.columns import Layout, log_layout
from trainer.data.filters import read_filter
from trainer.data.labels import Labels, label_list
from trainer.data.lines import LINES_AT_ONCE
from trainer.data.numbered import Block, NumberedReader
from trainer.data.numbers import parse_number
from trainer.data.options import ReadOptions
from trainer.data.rows import RowBuffer

NOT_UTF8 = "the line is not UTF-8 text, and JSON is read as UTF-8 whatever --encoding says"
_BATCH_PAIRS = 1 << 18


class BadLines(Protocol):
    """Takes lines that cannot be used."""

    def bad(self, reason: str, line: int) -> None:
        """One such line; returns only where bad lines are skipped."""


def objects(
    source: Source, rows: BadLines, advance: Callable[[int], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line that holds a JSON object; other lines are bad, blank ones passed over.

    A search engine's dump is unwrapped: the `_source` of a hit, and bulk action lines are passed over.
    """
    with source.open(advance) as stream:
        for line, raw in enumerate(stream, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf").strip()
            if not raw:
                continue
            try:
                value = orjson.loads(raw)
            except orjson.JSONDecodeError as problem:
                rows.bad(
                    NOT_UTF8 if not_utf8(raw) else f"the line is not valid JSON ({_place(problem)})", line
                )
                continue
            if not isinstance(value, dict):
                rows.bad("the line is not a JSON object in braces { }", line)
                continue
            inner = unwrap(value)
            if inner is not None:
                yield line, inner


def unwrap(value: dict[str, Any]) -> dict[str, Any] | None:
    """The document in a line of a search engine's dump: a hit's `_source`; None for a bulk action line."""
    inner = value.get("_source")
    if isinstance(inner, dict):
        return inner
    action = next(iter(value.values())) if len(value) == 1 else None
    return None if isinstance(action, dict) and next(iter(value)) in ("index", "create") else value


def starts_json(head: str) -> bool:
    """Whether a text begins like JSON lines."""
    first_line = head.lstrip().partition("\n")[0]
    return first_line.startswith("{") and ("\t" not in first_line or first_line.rstrip().endswith("}"))


def is_utf8_json(source: Source) -> bool:
    """Whether a file is JSON to be read as UTF-8.

    JSON has no other encoding than Unicode's, so the one that the user named is that of the text files beside
    it; a file that is in another one all the same has lines that are no UTF-8.
    """
    return starts_json(decode_head(source, "utf-8")) and b"\0" not in source.head[:64]


def not_utf8(raw: bytes) -> bool:
    """Whether bytes are no UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return True
    return False


def _place(problem: orjson.JSONDecodeError) -> str:
    message = problem.msg.partition(": line ")[0]
    return f"{message}, at character {problem.colno}" if problem.colno else message


def object_layout(first: dict[str, Any], options: ReadOptions, file: Path) -> tuple[list[str], Layout] | None:
    """Fields of a click-log object and their roles, from the first object; None where it is no click log."""
    names = list(first)
    layout = log_layout(names, options, file)
    return None if layout is None else (names, layout)


def read_objects(
    source: Source,
    names: list[str],
    layout: Layout,
    collector: Collector,
    part: int,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Read a click log of JSON objects into `collector`.

    Raises:
        InputError: a line is bad and bad lines stop.
    """
    rows = RowBuffer(collector, source, part)
    query_name, phrase_name = names[layout.query], names[layout.phrase]
    weight_name = None if layout.weight is None else names[layout.weight]
    match_name = None if layout.match_type is None else names[layout.match_type]
    extra_names = [names[at] for at in layout.extras.values()]
    for line, value in objects(source, rows, advance):
        query, phrase = value.get(query_name), value.get(phrase_name)
        if not isinstance(query, str) or not isinstance(phrase, str):
            name = phrase_name if isinstance(query, str) else query_name
            rows.bad(f'the field "{name}" is missing or is no text', line)
            continue
        weight = 1.0 if weight_name is None else _number(value.get(weight_name))
        if weight is None:
            rows.bad(f'the field "{weight_name}" is not a number', line)
            continue
        extras = [_text(value.get(name)) for name in extra_names]
        rows.add(line, query, phrase, weight, _text(value.get(match_name)) if match_name else "", extras)
    rows.flush()


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return parse_number(value, whole=False) if isinstance(value, str) else None


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()


def read_labelled(
    source: Source,
    fields: LabelledFields,
    labels: Labels | None,
    filter_file: Path | None,
    collector: Collector,
    part: int,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Read lines of a query and its labels: numbers into `labels`, or the label texts themselves.

    Args:
        source: the file.
        fields: names of its fields.
        labels: the label list that numbers refer to, if there is one.
        filter_file: pairs to take out of rankings, by line of this file (from 0) and number.
        collector: takes the pairs; their weight is 1 where no field has it.
        part: 0 training (or undivided), 1 test.
        advance: told of each block of bytes read.

    Raises:
        InputError: a line is bad and bad lines stop.
    """
    rows = RowBuffer(collector, source, part)
    numbers = _NumberedLines(collector, source, labels, part, filter_file)
    line = 0
    for line, value in objects(source, rows, advance):
        query, found, weights = fields.query(value), value.get(fields.labels), fields.weights_of(value)
        if query is None:
            reason = fields.no_query
        elif not isinstance(found, list):
            reason = f'the field "{fields.labels}" is missing or is no list'
        elif weights is not None and len(weights) != len(found):
            reason = f'the field "{fields.weights}" is no list of numbers as long as "{fields.labels}"'
        elif labels is not None and all(type(label) is int for label in found):
            numbers.add(line, query, found, weights)
            continue
        elif all(isinstance(label, str) for label in found):
            reason = ""
        elif all(type(label) is int for label in found):
            reason = "the labels are numbers, and there is no label list beside the file"
        else:
            reason = "the labels are neither all whole numbers nor all texts"
        if reason or query is None or not isinstance(found, list):
            numbers.flush()
            rows.bad(reason, line)
        elif not found:
            collector.leave_out("the query has no labels")
        else:
            for at, label in enumerate(found):
                rows.add(line, query, label, 1.0 if weights is None else weights[at])
    numbers.finish(max(line, rows.last_bad))
    rows.flush()


@dataclass(frozen=True)
class LabelledFields:
    """Names of the fields of a file of queries with labels.

    Attributes:
        queries: fields whose texts, joined by a blank, are the query; one of them must be there.
        labels: the field with the list of labels.
        weights: the field with the list of their weights, or None for none; it may be missing from a line.
    """

    queries: tuple[str, ...] = ("query",)
    labels: str = "labels"
    weights: str | None = None

    def query(self, value: dict[str, Any]) -> str | None:
        """The query of a line, or None where no field has it."""
        return joined_text(value, self.queries)

    @property
    def no_query(self) -> str:
        """What is wrong with a line without a query."""
        if len(self.queries) == 1:
            return f'the field "{self.queries[0]}" is missing or is no text'
        return f"none of the fields {', '.join(self.queries)} is a text"

    def weights_of(self, value: dict[str, Any]) -> list[float] | None:
        """Weights of a line's labels; None where it has none; empty where they are no numbers."""
        found = None if self.weights is None else value.get(self.weights)
        if found is None:
            return None
        plain = isinstance(found, list) and all(type(weight) in (int, float) for weight in found)
        return found if plain else []


def joined_text(value: dict[str, Any], fields: Sequence[str]) -> str | None:
    """The texts of the fields, joined by a blank; None where no field is a text."""
    if len(fields) == 1:
        only = value.get(fields[0])
        return only if isinstance(only, str) else None
    texts = [value[name] for name in fields if isinstance(value.get(name), str)]
    return " ".join(text for text in texts if text) if texts else None


class _NumberedLines:
    """Gathers lines of numbered labels into blocks, without making a string of each label."""

    def __init__(
        self,
        collector: Collector,
        source: Source,
        labels: Labels | None,
        part: int,
        filter_file: Path | None,
    ):
        self._reader = None
        self._source = source
        if labels is not None:
            pairs = read_filter(filter_file, labels, collector)
            self._reader = NumberedReader(collector, source.path, labels, part, pairs)
        self._clear()

    def _clear(self) -> None:
        self._lines: list[int] = []
        self._queries: list[str] = []
        self._counts: list[int] = []
        self._numbers: list[int] = []
        self._weights: list[float] = []

    def add(self, line: int, query: str, numbers: list[int], weights: list[float] | None) -> None:
        self._lines.append(line)
        self._queries.append(query)
        self._counts.append(len(numbers))
        self._numbers.extend(numbers)
        if weights is None and self._weights:
            weights = [1.0] * len(numbers)
        if weights is not None:
            missing = len(self._numbers) - len(self._weights) - len(weights)
            self._weights.extend([1.0] * missing)
            self._weights.extend(weights)
        if len(self._numbers) >= _BATCH_PAIRS or len(self._lines) >= LINES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if not self._lines or self._reader is None:
            return
        block = Block(
            np.array(self._lines, dtype=np.int64),
            pa.array(self._queries, pa.large_string()),
            np.array(self._counts, dtype=np.int64),
            _int64(self._numbers),
            np.array(self._weights, dtype=np.float64) if self._weights else None,
        )
        self._clear()
        self._reader.add(block)

    def finish(self, rows: int) -> None:
        self.flush()
        if self._reader is not None:
            self._reader.finish(rows)


def _int64(numbers: list[int]) -> np.ndarray:
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        return np.array([min(number, 2**63 - 1) for number in numbers], dtype=np.int64)


class _BadLabels:
    """Bad lines of a label list, which hold no pair: left empty, or an error."""

    def __init__(self, path: Path, options: ReadOptions):
        self._path, self._options = path, options
        self.first: tuple[str, int] | None = None

    def bad(self, reason: str, line: int) -> None:
        if self._options.bad_lines == "stop":
            raise InputError(reason, file=self._path, line=line, hint=SKIP_HINT)
        self.first = self.first or (reason, line)


def read_label_objects(
    path: Path,
    fields: Sequence[str],
    id_field: str,
    options: ReadOptions,
    advance: Callable[[int], None] | None = None,
) -> tuple[Labels, pa.Array]:
    """Read a label list of one JSON object a line.

    Args:
        path: the file, plain or packed.
        fields: fields whose texts, joined by a blank, are the label.
        id_field: the field with the label's own id.
        options: with `bad_lines`, whether a line that cannot be read stops or counts as an empty label.
        advance: told of each block of bytes read.

    Returns:
        The labels, and the own id of every line, string array (lines,), "" for none.

    Raises:
        InputError: the file cannot be read, a line is bad and bad lines stop, or no line holds a label.
    """
    source = open_source(path)
    bad = _BadLabels(path, options)
    texts, ids = _Column(), _Column()
    for line, value in objects(source, bad, advance):
        text = joined_text(value, fields)
        if text is None:
            bad.bad(f"no field {' or '.join(fields)} is a text", line)
            continue
        own = value.get(id_field)
        texts.put(line - 1, text)
        ids.put(line - 1, "" if own is None else str(own))
    if not len(texts):
        reason, at = bad.first or ("holds no label", None)
        also = "; no line holds a label" if bad.first else ""
        raise InputError(reason + also, file=path, line=at)
    own_ids = ids.array()
    return label_list(path, texts.array(), own_ids), own_ids


class _Column:
    """Texts by position, as an Arrow array in the making; positions passed over hold ""."""

    def __init__(self) -> None:
        self._chunks: list[pa.Array] = []
        self._waiting: list[str] = []
        self._done = 0

    def __len__(self) -> int:
        return self._done + len(self._waiting)

    def put(self, position: int, text: str) -> None:
        self._waiting.extend([""] * (position - len(self)))
        self._waiting.append(text)
        if len(self._waiting) >= LINES_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        self._chunks.append(pa.array(self._waiting, pa.large_string()))
        self._done += len(self._waiting)
        self._waiting = []

    def array(self) -> pa.Array:
        self._flush()
        return pa.concat_arrays(self._chunks)
