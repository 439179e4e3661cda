"""Writes a bundle: whole, on disk and verified before it gets its name, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bidmatch.base.errors import InputError
from bidmatch.base.files import sha256_file
from export.bundle.format import (
    CODES,
    FORMAT_VERSION,
    LINKS,
    LOOKUPS,
    MANIFEST,
    PHRASES,
    STEPS,
    TOKENIZER,
    UPPER,
    VECTORS,
    WIDE,
    WIDE_SCALES,
    FileRecord,
    Manifest,
    bundle_id,
    seal,
    targets_of,
)
from export.bundle.lookup import lookup_tables
from export.bundle.read import GraphArrays, verify_folder


def write_phrases(folder: Path, phrases: pa.Table) -> None:
    """Write `phrases.arrow`: `id` and `text`, then the other columns, each in one piece.

    Texts get 64-bit offsets, for beyond 2 GiB a column could not be one piece; so nothing need be copied to
    be read by row. And the tables that find the phrases (see `export.bundle.lookup`).

    Raises:
        InputError: there is no phrase, a column is missing, or an id or text is empty.
    """
    if not phrases.num_rows:
        raise InputError("the run has no phrases, so there is nothing to match")
    for position, name in enumerate(("id", "text")):
        if name not in phrases.column_names or phrases[name].null_count:
            raise InputError(f"every phrase needs a value in the column {name!r}")
        column = phrases[name].cast(pa.large_string())
        phrases = phrases.remove_column(phrases.column_names.index(name)).add_column(position, name, column)
    fields = [
        field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field
        for field in phrases.schema
    ]
    phrases = phrases.cast(pa.schema(fields)).replace_schema_metadata(None).combine_chunks()
    with pa.OSFile(str(folder / PHRASES), "wb") as sink, pa.ipc.new_file(sink, phrases.schema) as writer:
        writer.write_table(phrases)
    for name, table in zip(LOOKUPS, lookup_tables(phrases), strict=True):
        with (folder / name).open("wb") as stream:
            np.lib.format.write_array(stream, table.astype("<i8"), version=(1, 0))


def create_vectors(folder: Path, count: int, dim: int) -> np.memmap:
    """An empty float32 (count, dim) `vectors.npy`, mapped for writing; flush it when it is filled."""
    return _create(folder / VECTORS, "<f4", (count, dim))


def create_wide(folder: Path, count: int, dim: int) -> tuple[np.memmap, np.memmap]:
    """An empty int8 (count, dim) `wide.npy` and float32 (count, 2) `wide_scales.npy`, mapped for writing.

    `export.bundle.rescore.to_8_bits` gives what goes in; flush both when they are filled.
    """
    return _create(folder / WIDE, "i1", (count, dim)), _create(folder / WIDE_SCALES, "<f4", (count, 2))


def write_graph(folder: Path, graph: GraphArrays) -> None:
    """Write the index's files: `links.npy`, `upper.npy`, `codes.npy` and `steps.npy`."""
    for name, array, kind in (
        (LINKS, graph.links, "<u4"),
        (UPPER, graph.upper, "<u4"),
        (CODES, graph.codes, "i1"),
        (STEPS, graph.steps, "<f4"),
    ):
        with (folder / name).open("wb") as stream:
            np.lib.format.write_array(stream, array.astype(kind, copy=False), version=(1, 0))


def _create(file: Path, kind: str, shape: tuple[int, int]) -> np.memmap:
    return np.lib.format.open_memmap(file, mode="w+", dtype=np.dtype(kind), shape=shape, version=(1, 0))


def write_tokenizer(folder: Path, json_text: str) -> None:
    """Write `tokenizer.json`."""
    (folder / TOKENIZER).write_text(json_text, encoding="utf-8")


def finish(folder: Path, fields: dict[str, Any]) -> Manifest:
    """Hash all files, write the manifest over them, and read the whole folder back as a reader would.

    Args:
        folder: what `atomic_dir` yielded, with every file but the manifest in it.
        fields: the manifest's fields, as records, without `format_version`, `bundle_id`, `files`, `checksum`.

    Raises:
        DamagedError: what was written does not verify.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    files = {
        name: FileRecord(sha256=sha256_file(folder / name), bytes=(folder / name).stat().st_size)
        for name in names
    }
    manifest = Manifest.model_validate(
        {
            "format_version": FORMAT_VERSION,
            "bundle_id": bundle_id(
                {name: file.sha256 for name, file in files.items()},
                targets_of(fields["index"], fields["rescore"]),
            ),
            **fields,
            "files": files,
            "checksum": "0" * 64,
        }
    )
    (folder / MANIFEST).write_bytes(seal(manifest))
    with verify_folder(folder) as bundle:
        return bundle.manifest
