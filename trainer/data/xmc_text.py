"""Texts of one line each beside sparse label matrices: `trn_X.txt`, `trn_X_Y.txt`, `Y.txt` and so on.

Row i of the matrix has the labels of line i of the texts: `label:value` pairs below a header `rows labels`,
or a SciPy `.npz`; label j is line j of `Y.txt`. The names differ from code to code, and so does the folder of
the texts (beside the matrices, `raw_data` or `raw`); a line may begin with an id and `->`.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import scipy.sparse as sp
from numpy.lib.format import read_array_header_1_0, read_magic

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import Source, decode_head, detect_encoding, open_source, undecodable
from trainer.data.collect import Collector
from trainer.data.filters import find_filter, read_filter
from trainer.data.labels import Labels, read_label_lines
from trainer.data.lines import LINES_AT_ONCE, line_blocks
from trainer.data.numbered import Block, NumberedReader, Place
from trainer.data.options import ReadOptions
from trainer.data.recognised import LabelLists, Recognised, packed
from trainer.data.rows import SURROGATE
from trainer.data.sparse_text import SparseRows, parse_sparse_rows

_FOLDERS = ("", "raw_data", "raw", "raw_text")
_TEXTS = {
    "train": ("trn_X.txt", "trn.raw.txt", "train.raw.txt", "X.trn.txt", "train_raw_texts.txt"),
    "test": ("tst_X.txt", "tst.raw.txt", "test.raw.txt", "X.tst.txt", "test_raw_texts.txt"),
    "labels": ("Y.txt", "lbl.raw.txt", "label.raw.txt", "output-items.txt", "output-labels.txt"),
}
_MATRICES = {
    "train": ("trn_X_Y.txt", "trn_X_Y.npz", "Y.trn.npz", "Y.trn.txt"),
    "test": ("tst_X_Y.txt", "tst_X_Y.npz", "Y.tst.npz", "Y.tst.txt"),
}
_ID_ARROW = "->"


@dataclass(frozen=True)
class TextPart:
    """The files of one part.

    Attributes:
        side: `train` or `test`.
        texts: one query a line.
        matrix: the labels of each.
        labels: one label a line.
        filter_file: pairs to take out of rankings, or None.
    """

    side: str
    texts: Path
    matrix: Path
    labels: Path
    filter_file: Path | None


def find_texts(folder: Path) -> list[TextPart] | None:
    """The parts of a folder in this layout; None for another layout.

    Raises:
        InputError: the training matrix is there, and the texts or the label list are not.
    """
    matrix = _find([folder], _MATRICES["train"])
    if matrix is None:
        return None
    inside = [folder / name for name in _FOLDERS]
    texts, labels = _find(inside, _TEXTS["train"]), _find(inside, _TEXTS["labels"])
    if texts is None or labels is None:
        missing, names = ("queries", _TEXTS["train"]) if texts is None else ("labels", _TEXTS["labels"])
        raise InputError(
            f"holds {matrix.name} and no texts of the {missing} ({', '.join(names[:3])})",
            file=folder,
            hint="Bag-of-words features are not enough: take the data set's download of raw texts.",
        )
    parts = [TextPart("train", texts, matrix, labels, find_filter(inside, "train"))]
    test, test_matrix = _find(inside, _TEXTS["test"]), _find([folder], _MATRICES["test"])
    if test is not None and test_matrix is not None:
        parts.append(TextPart("test", test, test_matrix, labels, find_filter(inside, "test")))
    return parts


def _find(folders: list[Path], names: tuple[str, ...]) -> Path | None:
    for folder in folders:
        for name in names:
            for path in (folder / name, folder / f"{name}.gz"):
                if path.is_file():
                    return path
    return None


def recognise_texts(part: TextPart, options: ReadOptions, lists: LabelLists) -> Recognised:
    """One part of a folder in this layout.

    Raises:
        InputError: a file cannot be read, or is not of this kind.
    """
    source = open_source(part.texts)
    labels = lists.get(
        part.labels, lambda: read_label_lines(part.labels, options.encoding, _cleaner(part.labels, options))
    )
    matrix = _Matrix(part.matrix)
    if matrix.labels < len(labels.rows):
        raise InputError(
            f"has {len(labels.rows):,} labels, and {part.matrix.name} says that there are {matrix.labels:,}",
            file=part.labels,
        )

    files = part

    def read(collector: Collector, part: int, advance: Callable[[int], None] | None = None) -> None:
        _read(files, source, matrix, labels, collector, part, advance)

    names = f"{part.texts.name}, {part.matrix.name}, {part.labels.name}"
    name = f"extreme classification repository, texts and matrices ({names}{packed(source)})"
    columns = {"query": f"a line of {part.texts.name}", "phrase": f"a line of {part.labels.name}"}
    notes = labels.notes()
    if _has_ids(source, options):
        notes.insert(0, f"what stands before {_ID_ARROW} in {part.texts.name} was taken for an id")
    return Recognised(source, name, read, columns, notes, labels)


def _has_ids(source: Source, options: ReadOptions) -> bool:
    """Whether all lines of the head begin with an id and an arrow."""
    lines = decode_head(source, detect_encoding(source, options.encoding)).split("\n")[:-1][:1000]
    return bool(lines) and all(
        len(line.partition(_ID_ARROW)[0].split()) == 1 and _ID_ARROW in line for line in lines
    )


def _cleaner(path: Path, options: ReadOptions) -> Callable[[list[str]], list[str]] | None:
    if not path.is_file() or not _has_ids(open_source(path), options):
        return None
    return _without_ids


def _without_ids(lines: list[str]) -> list[str]:
    return [line.partition(_ID_ARROW)[2] if _ID_ARROW in line else line for line in lines]


class _Matrix:
    """Labels of each row.

    Attributes:
        path: the file.
        rows: how many it has.
        labels: how many labels it knows.
        is_text: whether its rows are lines, the first of them line 2.
    """

    def __init__(self, path: Path):
        self.path = path
        self._matrix: sp.csr_matrix | None = None
        if ".npz" in path.name:
            self._matrix = _load_npz(path)
            self.rows, self.labels = self._matrix.shape
            self.is_text = False
            return
        self._source = open_source(path)
        header = self._source.head.partition(b"\n")[0].removeprefix(b"\xef\xbb\xbf").split()
        if len(header) != 2 or not all(number.isdigit() for number in header):
            raise InputError(
                "does not begin with the numbers of rows and labels",
                file=path,
                line=1,
                hint="Such as: 294805 131073",
            )
        self.rows, self.labels = map(int, header)
        self.is_text = True

    def blocks(self, size: int, advance: Callable[[int], None] | None) -> Iterator[SparseRows]:
        """Its rows, `size` at once."""
        if self._matrix is not None:
            for start in range(0, self.rows, size):
                # Slices of the matrix itself would leave out indices that are none of its columns.
                ends = self._matrix.indptr[start : min(start + size, self.rows) + 1]
                inside = slice(ends[0], ends[-1])
                yield SparseRows(
                    np.ones(len(ends) - 1, dtype=bool),
                    np.diff(ends).astype(np.int64),
                    self._matrix.indices[inside].astype(np.int64),
                    self._matrix.data[inside].astype(np.float64),
                )
            return
        with self._source.open(advance) as stream:
            stream.readline()
            done = 0
            for lines in line_blocks(stream, "latin-1", size):
                if done + len(lines) > self.rows:
                    beyond = lines[self.rows - done :]
                    if any(line.strip() for line in beyond):
                        raise InputError(
                            f"has more rows than the {self.rows:,} that its first line says", file=self.path
                        )
                    lines = lines[: self.rows - done]
                if lines:
                    yield parse_sparse_rows(lines)
                done += len(lines)
        if done < self.rows:
            raise InputError(
                f"has {done:,} rows, and its first line says {self.rows:,}",
                file=self.path,
                hint="The file was cut short: download or copy it again.",
            )


def _load_npz(path: Path) -> sp.csr_matrix:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive of arrays, as .npz files are")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("error", UserWarning)
            _check_indices(path)
            return _as_csr(sp.load_npz(path))
    # What a damaged archive raises depends on where NumPy, SciPy or zlib meet the damage.
    except Exception as problem:
        raise InputError(
            f"is no sparse matrix that SciPy can read ({problem})",
            file=path,
            hint="Write it with scipy.sparse.save_npz.",
        ) from problem


def _check_indices(path: Path) -> None:
    """SciPy cuts fractions off the indices that it loads, and a label would become another.

    Raises:
        ValueError: indices of the archive are not whole numbers.
    """
    with zipfile.ZipFile(path) as archive:
        for name in ("indices", "indptr", "row", "col", "offsets"):
            if f"{name}.npy" in archive.namelist():
                with archive.open(f"{name}.npy") as file:
                    read_magic(file)
                    *_, dtype = read_array_header_1_0(file)
                if dtype.kind not in "iu":
                    raise ValueError(f"its {name} are {dtype}, not whole numbers")


def _as_csr(found: sp.sparray | sp.spmatrix) -> sp.csr_matrix:
    """A loaded matrix in rows; its values and the columns they stand in are not checked yet.

    Raises:
        ValueError: it is none of numbers in rows and columns, or its parts contradict each other.
    """
    if found.ndim != 2:
        raise ValueError(f"it has {found.ndim} dimensions, not rows and columns")
    if found.dtype.kind not in "biuf":
        raise ValueError(f"its values are {found.dtype}, not real numbers")
    if found.format != "csr":
        # A conversion writes wherever the indices say.
        if hasattr(found, "check_format"):
            found.check_format(full_check=True)
        matrix = sp.csr_matrix(found)
    else:
        if np.any(np.diff(found.indptr) < 0):
            raise ValueError("indptr decreases")
        matrix = sp.csr_matrix(found)
    matrix.sum_duplicates()
    return matrix


def _read(
    part: TextPart,
    source: Source,
    matrix: _Matrix,
    labels: Labels,
    collector: Collector,
    part_number: int,
    advance: Callable[[int], None] | None,
) -> None:
    """Read texts and matrix side by side.

    Raises:
        InputError: a line is bad and bad lines stop, or the files do not belong together.
    """
    options = collector.options
    encoding = detect_encoding(source, options.encoding)
    filter_pairs = read_filter(part.filter_file, labels, collector)
    place = Place(matrix.path, 1) if matrix.is_text else Place(matrix.path, -1, "row (from 0)")
    reader = NumberedReader(collector, part.texts, labels, part_number, filter_pairs, place)
    with_ids = _has_ids(source, options)
    done = 0
    try:
        with source.open(advance) as stream:
            texts = line_blocks(stream, encoding)
            for rows in matrix.blocks(LINES_AT_ONCE, advance):
                lines = next(texts, [])
                n = len(rows.good)
                if len(lines) < n:
                    raise _other_length(part, matrix, done + len(lines))
                if done + n == matrix.rows:
                    _no_more(lines[n:], part, matrix)
                lines = _without_ids(lines[:n]) if with_ids else lines[:n]
                reader.add(_block(lines, rows, done, part, matrix, source, encoding, collector))
                done += n
            for lines in texts:
                _no_more(lines, part, matrix)
    except UnicodeDecodeError:
        raise undecodable(source, encoding) from None
    reader.finish(done)


def _no_more(lines: list[str], part: TextPart, matrix: _Matrix) -> None:
    if any(line.strip() for line in lines):
        raise InputError(
            f"has more lines than {matrix.path.name} has rows ({matrix.rows:,})",
            file=part.texts,
            line=matrix.rows + 1,
            hint="The two files are not of one download.",
        )


def _other_length(part: TextPart, matrix: _Matrix, lines: int) -> InputError:
    return InputError(
        f"has {lines:,} lines, and {matrix.path.name} has {matrix.rows:,} rows",
        file=part.texts,
        hint="The two files are not of one download, or one was cut short.",
    )


def _block(
    lines: list[str],
    rows: SparseRows,
    start: int,
    part: TextPart,
    matrix: _Matrix,
    source: Source,
    encoding: str,
    collector: Collector,
) -> Block:
    """The good ones of the rows from `start` on; of the others none has pairs in `rows`.

    Raises:
        InputError: one is bad and bad lines stop.
    """
    lines_of = (start + np.flatnonzero(~rows.good) + 2).tolist()
    collector.bad_rows("the row is not made of pairs label:value", matrix.path, lines_of)
    keep, counts, labels, values = rows.good.copy(), rows.counts, rows.labels, rows.values
    try:
        queries = pa.array(lines, pa.large_string())
    except UnicodeEncodeError:
        if collector.options.bad_lines == "stop":
            raise undecodable(source, encoding) from None
        for at, line in enumerate(lines):
            if SURROGATE.search(line):
                lines[at] = ""
                keep[at] = False
                collector.bad("the text is not UTF-8", part.texts, start + at + 1)
        queries = pa.array(lines, pa.large_string())
    if not keep.all():
        inside = np.repeat(keep, counts)
        queries, counts, labels, values = (
            queries.filter(pa.array(keep)),
            counts[keep],
            labels[inside],
            values[inside],
        )
    return Block(start + np.flatnonzero(keep) + 1, queries, counts, labels, values)
