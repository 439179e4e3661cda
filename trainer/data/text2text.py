"""PECOS text2text: `label,label,...<TAB>text` lines, labels being lines of `output-labels.txt`, from 0.

A label may carry a relevance, `label::relevance`, which weighs the pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, undecodable
from trainer.data.collect import Collector
from trainer.data.columns import is_log_header
from trainer.data.filters import filter_beside, read_filter
from trainer.data.labels import Labels, read_label_lines
from trainer.data.lines import line_blocks
from trainer.data.numbered import Block, NumberedReader
from trainer.data.options import ReadOptions
from trainer.data.recognised import LabelLists, Recognised, packed
from trainer.data.rows import SURROGATE
from trainer.data.sparse_text import parse_sparse_rows

LABEL_NAMES = ("output-labels.txt", "output-items.txt", "output-labels.txt.gz", "output-items.txt.gz")
_OWN_LIST = "labels.txt"
# Names that only this layout has, and names that click logs have, too.
_OWN_TRAIN, _OWN_TEST = ("training-data", "train-data"), ("test-data", "testing-data")
_TRAIN = (*_OWN_TRAIN, "X.trn", "trn", "train")
_TEST = (*_OWN_TEST, "X.tst", "tst", "test")
_ENDS = (".txt", ".txt.gz", ".tsv", ".tsv.gz")
_LINE = re.compile(r"(\d+(::[-+.\deE]+)?(,\d+(::[-+.\deE]+)?)*)?\t.*\S.*")
_SEVERAL_OR_WEIGHED = re.compile(r"\d+(,\d|::)")


def label_list_of(path: Path, head: str) -> Path | None:
    """The label list of a text2text file; None for a file of another kind.

    The kind is told by the names of the two files, so that no line of the file can hide it, and where these
    may be a click log's as well, by what most of the first lines look like.

    Raises:
        InputError: it is text2text, and there is no label list beside it.
    """
    lines = _head_lines(head)
    stem, fitting = _stem(path), _mostly_fit(lines)
    headed = bool(lines) and is_log_header(lines[0].split("\t"))
    own = stem in (*_OWN_TRAIN, *_OWN_TEST)
    by_name = label_list_by_name(path)
    if by_name is not None and (own or fitting or not headed):
        return by_name
    if headed or not fitting:
        return None
    beside = next(
        (found for name in (*LABEL_NAMES, _OWN_LIST) if (found := path.parent / name).is_file()), None
    )
    if beside is None and (own or (stem in (*_TRAIN, *_TEST) and any(map(_SEVERAL_OR_WEIGHED.match, lines)))):
        raise InputError(
            f"refers to labels by number, and there is no {LABEL_NAMES[0]} beside it",
            file=path,
            hint="Put the label list of the data set, one label a line, into the same folder.",
        )
    return beside


def label_list_by_name(path: Path) -> Path | None:
    """The label list of a file that is text2text by its name and the list's; None where these do not say."""
    stem = _stem(path)
    names: tuple[str, ...] = LABEL_NAMES if stem in (*_TRAIN, *_TEST) else ()
    if stem in (*_OWN_TRAIN, *_OWN_TEST):
        names = (*LABEL_NAMES, _OWN_LIST)
    return next((found for name in names if (found := path.parent / name).is_file()), None)


def _stem(path: Path) -> str:
    return next((path.name[: -len(end)] for end in _ENDS if path.name.endswith(end)), "")


def _head_lines(head: str) -> list[str]:
    return [line.rstrip("\r") for line in head.split("\n")[:200] if line.strip()]


def _mostly_fit(lines: list[str]) -> bool:
    """Whether most lines are labels and a text."""
    fitting = [line for line in lines if _LINE.fullmatch(line)]
    return 2 * len(fitting) > len(lines) and any(not line.startswith("\t") for line in fitting)


def find_text2text(folder: Path) -> list[tuple[Path, int]] | None:
    """The data files of a folder in this layout with their parts; None for another layout."""
    train, test = (
        next(
            (path for name in names for end in _ENDS if (path := folder / f"{name}{end}").is_file()),
            None,
        )
        for names in (_TRAIN, _TEST)
    )
    if train is None or label_list_by_name(train) is None:
        return None
    return [(train, 0)] + ([(test, 1)] if test is not None else [])


def recognise_text2text(
    source: Source, labels_file: Path, encoding: str, options: ReadOptions, lists: LabelLists
) -> Recognised:
    """A data file with its label list.

    Raises:
        InputError: the label list cannot be read.
    """
    labels = lists.get(labels_file, lambda: read_label_lines(labels_file, options.encoding))

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        _read(source, encoding, labels, collector, part, advance)

    columns = {"query": "text after the tab", "phrase": f"a line of {labels_file.name}"}
    name = f"PECOS text2text (with {labels_file.name}{packed(source)})"
    return Recognised(source, name, read, columns, labels.notes(), labels)


def _read(
    source: Source,
    encoding: str,
    labels: Labels,
    collector: Collector,
    part: int,
    advance: Callable[[int], None] | None,
) -> None:
    filter_pairs = read_filter(filter_beside(source.path), labels, collector)
    reader = NumberedReader(collector, source.path, labels, part, filter_pairs)
    line = 1
    try:
        with source.open(advance) as stream:
            for lines in line_blocks(stream, encoding):
                reader.add(_block(lines, line, source, encoding, collector))
                line += len(lines)
    except UnicodeDecodeError:
        raise undecodable(source, encoding) from None
    reader.finish(line - 1)


def _block(lines: list[str], start: int, source: Source, encoding: str, collector: Collector) -> Block:
    fields, queries, kept = [], [], []
    for line, text in enumerate(lines, start):
        labels, tab, query = text.partition("\t")
        if not text.strip():
            continue
        if not tab:
            collector.bad("the line has no tab between labels and text", source.path, line)
        elif SURROGATE.search(text):
            if collector.options.bad_lines == "stop":
                raise undecodable(source, encoding)
            collector.bad("the text is not UTF-8", source.path, line)
        else:
            fields.append(labels)
            queries.append(query)
            kept.append(line)
    rows = parse_sparse_rows([_as_sparse(field) for field in fields])
    for at in np.flatnonzero(~rows.good):
        reason = "what stands before the tab is not a list of label numbers"
        collector.bad(reason, source.path, kept[at])
    good = pa.array(rows.good)
    return Block(
        np.array(kept, dtype=np.int64)[rows.good],
        pa.array(queries, pa.large_string()).filter(good),
        rows.counts[rows.good],
        rows.labels,
        rows.values,
    )


def _as_sparse(field: str) -> str:
    """`1,2` and `1::0.5,2::1` as `1:1 2:1` and `1:0.5 2:1`."""
    if "::" not in field:
        return (field.strip().replace(",", ":1 ") + ":1") if field.strip() else ""
    items = field.strip().split(",")
    return " ".join(item.replace("::", ":") if "::" in item else f"{item}:1" for item in items)
