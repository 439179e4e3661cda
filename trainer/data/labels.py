"""Label lists: the phrases that a data set numbers, one a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bidmatch.base.errors import InputError
from bidmatch.base.input_files import detect_encoding, open_source, undecodable
from bidmatch.base.strings import key_array, normalise_array
from trainer.data.lines import line_blocks


@dataclass(frozen=True)
class Catalogue:
    """A phrase list that the data brings along, such as `labels.txt`.

    Attributes:
        ids: string array (L,), unique.
        texts: normalised text of each; keys distinct.
    """

    ids: pa.Array
    texts: pa.Array


@dataclass(frozen=True)
class Labels:
    """A label list, read.

    Attributes:
        path: the file.
        catalogue: its distinct labels, in the order of the first line that holds each.
        texts: normalised text of every line, "" where it is empty.
        rows: int32 (lines,), row of each line's label in the catalogue, -1 where the line is empty.
    """

    path: Path
    catalogue: Catalogue
    texts: pa.Array
    rows: np.ndarray

    def notes(self) -> list[str]:
        """What to say of lines that hold no label of their own."""
        empty = int((self.rows < 0).sum())
        merged = len(self.rows) - empty - len(self.catalogue.ids)
        said = []
        if merged:
            said.append(
                f"{merged:,} lines of {self.path.name} repeat an earlier label and were merged with it"
            )
        if empty:
            said.append(f"{empty:,} lines of {self.path.name} are empty")
        return said

    def fault(self, number: int) -> str:
        """Why a number is none of a label."""
        if not 0 <= number < len(self.rows):
            return f"label {number} is not a line of {self.path.name} (0 to {len(self.rows) - 1:,})"
        return f"label {number} is an empty line of {self.path.name}"


def label_list(path: Path, texts: pa.Array, ids: pa.Array | None = None) -> Labels:
    """A label list from the text of each line (n,), "" for none.

    Args:
        path: where it comes from.
        texts: string array (n,), unnormalised, no nulls.
        ids: the data's own id of each line; the line's number (from 0) where None, or where the ids of
            distinct labels are not distinct.
    """
    texts = normalise_array(texts)
    encoded = key_array(texts).dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int32)
    # Codes follow first appearance, so those above the empty text's move up by one.
    nothing = pc.index(encoded.dictionary, "").as_py()
    if nothing >= 0:
        codes = np.where(codes == nothing, -1, codes - (codes > nothing)).astype(np.int32)
    distinct, first = np.unique(codes, return_index=True)
    kept = first[distinct >= 0]
    own = None if ids is None else ids.take(pa.array(kept)).cast(pa.string())
    if own is None or pc.any(pc.equal(own, "")).as_py() or len(pc.unique(own)) < len(own):
        own = pa.array(kept).cast(pa.string())
    catalogue = Catalogue(own, texts.take(pa.array(kept)).cast(pa.string()))
    return Labels(path, catalogue, texts, codes)


def read_label_lines(
    path: Path, encoding: str | None = None, clean: Callable[[list[str]], list[str]] | None = None
) -> Labels:
    """Read a label list of one label a line, numbered from 0.

    Args:
        path: the file, plain or packed.
        encoding: its codec; None: byte-order mark, else UTF-8.
        clean: what to make of lines before they are labels.

    Raises:
        InputError: missing, empty, or not text in that encoding.
    """
    if not path.exists():
        raise InputError(
            "cannot be read (there is no such file)",
            file=path,
            hint="Data that refers to labels by number needs the label list beside it, one label a line.",
        )
    source = open_source(path)
    codec = detect_encoding(source, encoding)
    chunks: list[pa.Array] = []
    try:
        with source.open() as stream:
            for lines in line_blocks(stream, codec):
                chunks.append(pa.array(lines if clean is None else clean(lines), pa.large_string()))
    except UnicodeError:
        raise undecodable(source, codec) from None
    texts = pa.concat_arrays(chunks)
    filled = np.flatnonzero(pc.not_equal(pc.utf8_trim_whitespace(texts), "").to_numpy(zero_copy_only=False))
    return label_list(path, texts.slice(0, int(filled[-1]) + 1 if len(filled) else 0))
