"""What a file is, by its content; each answer knows how to read itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import orjson

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import EmptyFileError, Source, decode_head, detect_encoding, encoding_name
from trainer.data import delimited, jsonlines
from trainer.data.collect import Collector
from trainer.data.columnar import ParquetLog
from trainer.data.filters import filter_beside
from trainer.data.jsonlines import LabelledFields
from trainer.data.labels import read_label_lines
from trainer.data.options import ReadOptions
from trainer.data.recognised import LabelLists, Recognised, packed
from trainer.data.report_text import TextReport, recognise_text_report
from trainer.data.text2text import label_list_of, recognise_text2text
from trainer.data.ubi import UbiJoin, is_event, is_query
from trainer.data.workbook import Workbook
from trainer.data.xmc_json import is_xmc_object, recognise_xmc_json

_LOOK_AT_LINES = 100
# "points features labels", then "label,label feature:value feature:value".
_BAG_OF_WORDS = re.compile(r"\d+ \d+ \d+\r?\n(\d+(,\d+)*)? *\d+:\S+( \d+:\S+)* *\r?\n")
_SPARSE = re.compile(r"\d+ \d+\r?\n(\d+:\S+( \d+:\S+)*)? *\r?\n")


def recognise(source: Source, options: ReadOptions, ubi: UbiJoin, lists: LabelLists) -> Recognised:
    """Find out what a file is.

    Args:
        source: the file.
        options: what the user said of it.
        ubi: shared by the files of one call, for those that are User Behavior Insights.
        lists: shared by the files of one call, for those that refer to a label list.

    Raises:
        InputError: nothing that can be read.
    """
    if source.kind == "parquet":
        log = ParquetLog(source, options)
        return Recognised(source, "click log (Parquet)", log.read, log.layout.names)
    if source.kind == "xlsx":
        return _recognise_workbook(source, options)
    encoding = detect_encoding(source, options.encoding)
    head = decode_head(source, encoding)
    if not head.strip():
        raise EmptyFileError(source.path)
    if jsonlines.starts_json(head) or jsonlines.is_utf8_json(source):
        if not encoding.startswith("utf-8") and not jsonlines.is_utf8_json(source):
            raise InputError(
                f"is JSON in {encoding_name(encoding)}", file=source.path, hint="Save the file as UTF-8."
            )
        return _recognise_json(source, options, ubi, lists)
    if head.lstrip().startswith("[{"):
        raise InputError(
            "is one JSON array, not JSON lines",
            file=source.path,
            hint="Write one object a line, for instance with: jq -c '.[]' file.json > file.jsonl",
        )
    if _BAG_OF_WORDS.match(head):
        raise InputError(
            "is a bag-of-words file of the extreme classification repository, which holds no text",
            file=source.path,
            hint="Download the data set's raw texts; their folder is read as it is.",
        )
    if _SPARSE.match(head):
        raise InputError(
            "is a sparse label matrix, which belongs to files of texts",
            file=source.path,
            hint="Name the folder that holds it together with trn_X.txt and Y.txt.",
        )
    label_file = label_list_of(source.path, head)
    if label_file is not None:
        return recognise_text2text(source, label_file, encoding, options, lists)
    found = recognise_text_report(source, head, encoding, options)
    if isinstance(found, TextReport):
        written = "TSV" if found.delimiter == "\t" else "CSV"
        return _recognised_report(found, f"{written}{packed(source)}, {encoding_name(encoding)}")
    try:
        return _recognise_log(source, head, encoding, options)
    except InputError:
        if found is not None:
            raise found from None
        raise


def _recognise_workbook(source: Source, options: ReadOptions) -> Recognised:
    book = Workbook(source, options)
    if book.report.platform:
        return _recognised_report(book, f"Excel, sheet {book.sheet!r}")
    return Recognised(source, f"click log (Excel, sheet {book.sheet!r})", book.read, book.report.layout.names)


def _recognised_report(found: TextReport | Workbook, written: str) -> Recognised:
    report = found.report
    columns, notes = dict(report.layout.names), []
    if report.titles:
        notes.append("above the header: " + " | ".join(report.titles[:2]))
    if isinstance(found, TextReport) and found.bare_quotes:
        notes.append('keywords in plain quotes ("...") were taken for phrase match')
    if report.term_match is not None and report.layout.match_type is None:
        name = report.headers[report.term_match].strip()
        if found.notation:
            notes.append(
                f"match types come from the keywords' notation; a bare keyword is broad; {name!r} is not used"
            )
        else:
            columns["match_type"] = name
            notes.append(
                f"keywords carry no match-type notation, so {name!r} of the search term is used instead"
            )
    return Recognised(
        found.source, f"{report.platform} search terms report ({written})", found.read, columns, notes
    )


def _recognise_log(source: Source, head: str, encoding: str, options: ReadOptions) -> Recognised:
    dialect, layout = delimited.recognise_log(source, head, encoding, options)
    name = f"click log ({dialect.name}{packed(source)}, {encoding_name(encoding)})"
    notes = [] if dialect.header_lines else ["no header line: columns taken by position"]

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        delimited.read_log_file(source, dialect, layout, collector, part, advance)

    return Recognised(source, name, read, layout.names, notes)


def _first_object(source: Source) -> dict[str, Any]:
    with source.open() as stream:
        for number, raw in enumerate(islice(stream, _LOOK_AT_LINES), start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError as problem:
                if jsonlines.not_utf8(line):
                    raise InputError(
                        jsonlines.NOT_UTF8, file=source.path, line=number, hint="Save the file as UTF-8."
                    ) from None
                raise InputError(
                    f"starts like JSON lines, but the line is not valid JSON ({problem.msg})",
                    file=source.path,
                    line=number,
                    hint="JSONL has one whole JSON object on each line.",
                ) from None
            inner = jsonlines.unwrap(value) if isinstance(value, dict) else None
            if inner is not None:
                return inner
    raise InputError("holds no JSON object", file=source.path)


def _recognise_json(source: Source, options: ReadOptions, ubi: UbiJoin, lists: LabelLists) -> Recognised:
    first = _first_object(source)
    if "query" in first and "labels" in first:
        return _recognise_labelled(source, first, options, lists)
    if is_xmc_object(first):
        return recognise_xmc_json(source, options, lists)
    if is_query(first):
        return _recognise_ubi_queries(source, ubi)
    if is_event(first):
        columns = {"query": "user_query", "phrase": "event_attributes.object.object_id"}
        name = f"User Behavior Insights events (JSONL{packed(source)})"
        return Recognised(source, name, partial(ubi.read_events, source), columns)
    found = jsonlines.object_layout(first, options, source.path)
    if found is None:
        raise InputError(
            "the JSON objects have no field named as a query and a phrase (fields: " + ", ".join(first) + ")",
            file=source.path,
            hint="Say which to use with --query-column and --phrase-column. "
            "Where the file is one of a data set's several, name their folder.",
        )
    names, layout = found

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        jsonlines.read_objects(source, names, layout, collector, part, advance)

    return Recognised(source, f"click log (JSONL{packed(source)})", read, layout.names)


def _recognise_ubi_queries(source: Source, ubi: UbiJoin) -> Recognised:
    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:  # noqa: ARG001
        ubi.read_queries(source, collector, advance)

    return Recognised(source, f"User Behavior Insights queries (JSONL{packed(source)})", read, first=True)


def _recognise_labelled(
    source: Source, first: dict[str, Any], options: ReadOptions, lists: LabelLists
) -> Recognised:
    found = first["labels"]
    beside = source.path.parent / "labels.txt"
    texts = isinstance(found, list) and bool(found) and isinstance(found[0], str)
    labels = None
    if not texts or beside.exists():
        labels = lists.get(beside, lambda: read_label_lines(beside, options.encoding))
    filter_file = None if labels is None else filter_beside(source.path)

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        jsonlines.read_labelled(source, LabelledFields(), labels, filter_file, collector, part, advance)

    beside_name = " and labels.txt" if labels else ""
    name = f'queries with labels (JSONL {{"query", "labels"}}{beside_name}{packed(source)})'
    columns = {"query": "query", "phrase": "labels"}
    return Recognised(source, name, read, columns, [] if labels is None else labels.notes(), labels)
