"""Filter files: pairs `row label` to take out of rankings, as the extreme classification repository has them.

Its product-to-product data sets hold an item both as a query and as a label. A query's own label, and pairs
whose mirror image is in the training part, would be found by copying; the filter files name them. Both
spellings in use are read: `filter_labels_train.txt` and `filter_labels_test.txt`, `trn_filter_labels.txt` and
`tst_filter_labels.txt`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import EmptyFileError, detect_encoding, open_source, undecodable
from trainer.data.collect import ALL_BAD_HINT, Collector
from trainer.data.labels import Labels
from trainer.data.lines import line_blocks
from trainer.data.sparse_text import parse_integer_pairs

TRAIN_STEMS = ("trn", "train")
TEST_STEMS = ("tst", "test")
_NAMES = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt", "filter_labels_trn.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt", "filter_labels_tst.txt"),
}
FILTER_NAMES = tuple(name + packed for names in _NAMES.values() for name in names for packed in ("", ".gz"))

_NOT_A_PAIR = "the line is not a row and a label, two whole numbers"
_BOM_IN_LATIN_1 = codecs.BOM_UTF8.decode("latin-1")


@dataclass(frozen=True)
class FilterPairs:
    """A filter file, read; sorted by row.

    Attributes:
        path: the file.
        rows: int64 (pairs,), number of the query in its file, from 0.
        labels: int32 (pairs,), number of the label in the label list.
        lines: int64 (pairs,), line of the pair, from 1.
    """

    path: Path
    rows: np.ndarray
    labels: np.ndarray
    lines: np.ndarray


def find_filter(folders: Sequence[Path], side: str) -> Path | None:
    """The filter file of the `train` or `test` side in the first of the folders that has one."""
    for folder in folders:
        for name in _NAMES[side]:
            for path in (folder / name, folder / f"{name}.gz"):
                if path.is_file():
                    return path
    return None


def filter_beside(path: Path) -> Path | None:
    """The filter file that belongs to a data file, by its name: that of `trn.*` or `tst.*` beside it."""
    stem = path.name.split(".", 1)[0].casefold()
    if stem in TRAIN_STEMS:
        return find_filter([path.parent], "train")
    return find_filter([path.parent], "test") if stem in TEST_STEMS else None


def read_filter(path: Path | None, labels: Labels, collector: Collector) -> FilterPairs | None:
    """Read a filter file; an empty one holds no pair.

    Args:
        path: the file, or None for none.
        labels: what its labels refer to.
        collector: applies the bad-lines policy.

    Raises:
        InputError: it cannot be read, a line is bad and bad lines stop, or all lines are bad.
    """
    if path is None:
        return None
    pairs, lines = [np.empty((0, 2), dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    start = 1
    try:
        source = open_source(path)
    except EmptyFileError:
        return FilterPairs(path, pairs[0][:, 0], pairs[0][:, 1].astype(np.int32), lines[0])
    encoding = detect_encoding(source, None)
    bad: list[tuple[int, str]] = []
    try:
        with source.open() as stream:
            # Numbers are the same in UTF-8 and Latin-1, which takes any byte: what is none is a bad line.
            plain = encoding.startswith("utf-8")
            for block in line_blocks(stream, "latin-1" if plain else encoding):
                if plain and start == 1:
                    block[0] = block[0].removeprefix(_BOM_IN_LATIN_1)
                good, numbers = parse_integer_pairs(block)
                number = np.arange(start, start + len(block))
                start += len(block)
                blank = np.array([not line.strip() for line in block])
                broken = number[~good & ~blank].tolist()
                collector.bad_rows(_NOT_A_PAIR, path, broken)
                bad += [(line, _NOT_A_PAIR) for line in broken[:1]]
                number = number[good]
                known = numbers[:, 1] < len(labels.rows)
                wrong = numbers[~known, 1]
                unknown = number[~known].tolist()
                fault = labels.fault(int(wrong[0])) if len(wrong) else ""
                collector.bad_rows(f"the label is no line of {labels.path.name}", path, unknown, fault)
                bad += [(line, fault) for line in unknown[:1]]
                pairs.append(numbers[known])
                lines.append(number[known])
    except UnicodeDecodeError:
        raise undecodable(source, encoding) from None
    if bad and not any(map(len, lines)):
        first, reason = min(bad)
        raise InputError(reason, file=path, line=first, hint=ALL_BAD_HINT)
    both, line = np.concatenate(pairs), np.concatenate(lines)
    order = np.argsort(both[:, 0], kind="stable")
    return FilterPairs(path, both[order, 0], both[order, 1].astype(np.int32), line[order])
