"""JSON lines: `{"query", "phrase"[, "weight"]}` click logs and `{"query", "labels"}` with `labels.txt`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source
from bidmatch.base.text import key, normalise
from trainer.data.assemble import Catalogue
from trainer.data.collect import Batch, Collector
from trainer.data.columns import Layout, log_layout
from trainer.data.numbers import parse_number
from trainer.data.options import ReadOptions
from trainer.data.rows import RowBuffer

_BATCH_PAIRS = 1 << 18


def objects(
    source: Source, rows: RowBuffer, advance: Callable[[int], None] | None = None
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
                rows.bad(f"the line is not valid JSON ({_place(problem)})", line)
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


@dataclass(frozen=True)
class Labels:
    """`labels.txt`, read.

    Attributes:
        path: the file.
        catalogue: its distinct labels; the id is the number of the first line (from 0) that holds it.
        texts: normalised text of every line, "" where it is empty.
        merged: lines whose key an earlier line had.
        empty: lines without text.
    """

    path: Path
    catalogue: Catalogue
    texts: pa.Array
    merged: int
    empty: int


def read_labels(path: Path) -> Labels:
    """Read `labels.txt`: one label a line, numbered from 0.

    Raises:
        InputError: missing, or not UTF-8 text.
    """
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise InputError(
            f"cannot be read ({problem.strerror})",
            file=path,
            hint='Files of {"query", "labels"} with numbers need a labels.txt beside them, one label a line.',
        ) from None
    try:
        lines = raw.decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as bad:
        line = raw[: bad.start].count(b"\n") + 1
        raise InputError(
            "is not UTF-8 text from here on", file=path, line=line, hint="Save it as UTF-8."
        ) from None
    texts = [normalise(line) for line in lines]
    first: dict[str, int] = {}
    for number, text in enumerate(texts):
        if text:
            first.setdefault(key(text), number)
    kept = list(first.values())
    empty = texts.count("")
    return Labels(
        path,
        Catalogue(pa.array([str(number) for number in kept]), pa.array([texts[number] for number in kept])),
        pa.array(texts, pa.large_string()),
        len(texts) - empty - len(kept),
        empty,
    )


def read_labelled(
    source: Source,
    labels: Labels | None,
    collector: Collector,
    part: int,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Read `{"query", "labels"}` lines: numbers into `labels`, or the label texts themselves. Weights are 1.

    Raises:
        InputError: a line is bad and bad lines stop.
    """
    rows = RowBuffer(collector, source, part)
    numbers = _NumberedPairs(collector, source, labels, part)
    texts = labels.texts.to_pylist() if labels is not None else []
    for line, value in objects(source, rows, advance):
        query, found = value.get("query"), value.get("labels")
        if not isinstance(query, str):
            reason = 'the field "query" is missing or is no text'
        elif not isinstance(found, list):
            reason = 'the field "labels" is missing or is no list'
        elif all(type(label) is int for label in found):
            reason = _label_fault(found, texts)
        elif all(isinstance(label, str) for label in found):
            reason = ""
        else:
            reason = "the labels are neither all whole numbers nor all texts"
        if reason or not isinstance(query, str) or not isinstance(found, list):
            numbers.flush()
            rows.bad(reason, line)
        elif not found:
            collector.leave_out("the query has no labels")
        elif isinstance(found[0], str):
            for label in found:
                rows.add(line, query, label)
        else:
            numbers.add(line, query, found)
    numbers.flush()
    rows.flush()


def _label_fault(found: list[int], texts: list[str]) -> str:
    for label in found:
        if not 0 <= label < len(texts):
            return f"label {label} is not a line of labels.txt (0 to {len(texts) - 1:,})"
        if not texts[label]:
            return f"label {label} is an empty line of labels.txt"
    return ""


class _NumberedPairs:
    """Buffers (query, label numbers) and hands them on without making a string of each label."""

    def __init__(self, collector: Collector, source: Source, labels: Labels | None, part: int):
        self._collector, self._source, self._labels, self._part = collector, source, labels, part
        self._clear()

    def _clear(self) -> None:
        self._lines: list[int] = []
        self._queries: list[str] = []
        self._counts: list[int] = []
        self._numbers: list[int] = []

    def add(self, line: int, query: str, numbers: list[int]) -> None:
        self._lines.append(line)
        self._queries.append(query)
        self._counts.append(len(numbers))
        self._numbers.extend(numbers)
        if len(self._numbers) >= _BATCH_PAIRS:
            self.flush()

    def flush(self) -> None:
        if not self._lines or self._labels is None:
            return
        queries = pa.array(self._queries, pa.large_string()).dictionary_encode()
        repeat = np.repeat(np.arange(len(self._lines)), self._counts)
        used, codes = np.unique(np.array(self._numbers), return_inverse=True)
        batch = Batch(
            queries.take(pa.array(repeat)),
            pa.DictionaryArray.from_arrays(
                pa.array(codes, pa.int32()), self._labels.texts.take(pa.array(used))
            ),
            np.ones(len(repeat)),
            np.array(self._lines)[repeat],
        )
        self._clear()
        self._collector.add(batch, self._source.path, self._part)
