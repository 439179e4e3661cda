"""What a file is, by its content; each answer knows how to read itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from bidmatch.base.errors import InputError
from trainer.data import delimited, jsonlines
from trainer.data.collect import Collector
from trainer.data.jsonlines import Labels
from trainer.data.options import ReadOptions
from trainer.data.source import Source, decode_head, detect_encoding, encoding_name


class Read(Protocol):
    """Reads one recognised file into a collector."""

    def __call__(self, collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        """Read; `advance` is told of each block of bytes read from disk."""


@dataclass(frozen=True)
class Recognised:
    """A file whose kind is known.

    Attributes:
        source: the file.
        format: name for people.
        read: reads its pairs.
        columns: role -> header.
        notes: what else to say.
        labels: the label list that its numbers refer to, if it is of that kind.
    """

    source: Source
    format: str
    read: Read
    columns: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    labels: Labels | None = None


def recognise(source: Source, options: ReadOptions) -> Recognised:
    """Find out what a file is.

    Raises:
        InputError: nothing that can be read.
    """
    encoding = detect_encoding(source, options.encoding)
    head = decode_head(source, encoding)
    if head.lstrip().startswith("{"):
        return _recognise_json(source, head, options)
    if head.lstrip().startswith("[{"):
        raise InputError(
            "is one JSON array, not JSON lines",
            file=source.path,
            hint="Write one object a line, for instance with: jq -c '.[]' file.json > file.jsonl",
        )
    dialect, layout = delimited.recognise_log(source, head, encoding, options)
    name = f"click log ({dialect.name}{_packed(source)}, {encoding_name(encoding)})"
    notes = [] if dialect.header_lines else ["no header line: columns taken by position"]

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        delimited.read_log_file(source, dialect, layout, collector, part, advance)

    return Recognised(source, name, read, layout.names, notes)


def _packed(source: Source) -> str:
    return f", {source.packing}" if source.packing else ""


def _first_object(source: Source, head: str) -> dict[str, Any]:
    for number, line in enumerate(io.StringIO(head), start=1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as problem:
            raise InputError(
                f"starts like JSON lines, but the line is not valid JSON ({problem.msg})",
                file=source.path,
                line=number,
                hint="JSONL has one whole JSON object on each line.",
            ) from None
        if isinstance(value, dict):
            inner = value.get("_source")
            return inner if isinstance(inner, dict) else value
    raise InputError("holds no JSON object", file=source.path)


def _recognise_json(source: Source, head: str, options: ReadOptions) -> Recognised:
    first = _first_object(source, head)
    if "query" in first and "labels" in first:
        return _recognise_labelled(source, first)
    found = jsonlines.object_layout(first, options, source.path)
    if found is None:
        raise InputError(
            "the JSON objects have no field named as a query and a phrase (fields: " + ", ".join(first) + ")",
            file=source.path,
            hint="Say which to use with --query-column and --phrase-column.",
        )
    names, layout = found

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        jsonlines.read_objects(source, names, layout, collector, part, advance)

    return Recognised(source, f"click log (JSONL{_packed(source)})", read, layout.names)


def _recognise_labelled(source: Source, first: dict[str, Any]) -> Recognised:
    found = first["labels"]
    beside = source.path.parent / "labels.txt"
    texts = isinstance(found, list) and bool(found) and isinstance(found[0], str)
    labels = None if texts and not beside.exists() else jsonlines.read_labels(beside)
    notes = []
    if labels is not None:
        if labels.merged:
            notes.append(
                f"{labels.merged:,} lines of labels.txt repeat an earlier label and were merged with it"
            )
        if labels.empty:
            notes.append(f"{labels.empty:,} lines of labels.txt are empty")

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        jsonlines.read_labelled(source, labels, collector, part, advance)

    name = (
        'queries with labels (JSONL{"query", "labels"}'
        + (" and labels.txt" if labels else "")
        + _packed(source)
    )
    return Recognised(
        source,
        name.replace("JSONL{", "JSONL {") + ")",
        read,
        {"query": "query", "phrase": "labels"},
        notes,
        labels,
    )
