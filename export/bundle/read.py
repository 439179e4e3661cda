"""Opens a bundle: all of it is verified before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from bidmatch.base import text
from bidmatch.base.errors import DamagedError
from bidmatch.base.files import PARTIAL_SUFFIX
from export.bundle.format import (
    CODES,
    ENCODER_INT8,
    FORMAT_VERSION,
    IDS,
    INDEX_FILES,
    KEYS,
    LINKS,
    LOOKUPS,
    MANIFEST,
    PHRASES,
    REQUIRED_FILES,
    RUNS,
    STEPS,
    UPPER,
    VECTORS,
    WIDE,
    WIDE_FILES,
    WIDE_SCALES,
    Manifest,
    bundle_id,
    checksum_holds,
    targets_of,
)
from export.bundle.lookup import hash_texts
from export.bundle.weights import EVEN, wide_weights

_BLOCK_BYTES = 1 << 22
_MANIFEST_LIMIT = 1 << 24
_SAMPLED_NODES = 256
_NPY_HEADER_BYTES = 128  # of an array of two dimensions


_ANEW = "Copy it again from where it was made, or export it again; `bidmatch inspect` verifies one."


def _damaged(path: Path, reason: str, hint: str = _ANEW) -> NoReturn:
    raise DamagedError(
        f"{path} is no sound bundle: {reason}",
        hint=hint,
    )


@dataclass(frozen=True)
class WideVectors:
    """[w_D Φ_D(z) ⊕ w_C N(Ψ)] of the wide heads in 8 bits: value times the scale of its row and part.

    Attributes:
        rows: int8 (L, rescore.dim), row i for phrase i. Memory-mapped, read-only.
        scales: float32 (L, 2), finite, >= 0, of the Φ_D part and of the Φ_C part. Memory-mapped, read-only.
        encoder_dim: width of the Φ_D part, from the left.
        weights: (w_D, w_C) of the parts, which are in their scales already: the largest values of their
            scores.
    """

    rows: np.ndarray
    scales: np.ndarray
    encoder_dim: int
    weights: tuple[float, float] = EVEN


class GraphArrays(NamedTuple):
    """An HNSW graph and the vectors in 8 bits that it is walked by, as the bundle's files hold them.

    Attributes:
        links: uint32 (L, degree): a row's neighbours at level 0, filled up with 2^32 - 1.
        upper: uint32 (n, 2 + degree above), from the top level down, first the entry: a row; its place one
            level below in this array, or 2^32 - 1 at level 1; its neighbours, as places in this array.
        codes: int8 (L, dim), the vectors over `steps`, rounded.
        steps: float32 (1, dim), >= 0.
    """

    links: np.ndarray
    upper: np.ndarray
    codes: np.ndarray
    steps: np.ndarray


class Lookups(NamedTuple):
    """Tables of `export.bundle.lookup`, int64 (2, n) each: sorted hashes and their rows.

    Attributes:
        ids: by the phrase's id, all L.
        keys: by the phrase's key, all L.
        runs: by the words of phrases that were bought for queries which contain them.
    """

    ids: np.ndarray
    keys: np.ndarray
    runs: np.ndarray


@dataclass(frozen=True)
class Bundle:
    """A verified bundle. Its files stay open, so what is loaded later is what was verified now.

    Attributes:
        path: the folder.
        manifest: what it says of itself.
        phrases: Arrow table of L rows: `id` (string, unique), `text` (string), user columns. Memory-mapped.
        vectors: float32 (L, dim), [w_D Φ_D(z) ⊕ w_C N(Ψ)], row i for phrase i. Memory-mapped, read-only.
        graph: what is searched; None where the index is in Milvus. Memory-mapped, read-only.
        wide: the vectors that re-score what the index finds; None where the bundle has none.
        lookups: how phrases are found by their texts. Memory-mapped, read-only.
        stamps: what tells a file from another one, or from itself written to, by its name.
    """

    path: Path
    manifest: Manifest
    phrases: pa.Table
    vectors: np.ndarray
    graph: GraphArrays | None
    wide: WideVectors | None
    lookups: Lookups
    stamps: Mapping[str, tuple[int, ...]] = field(repr=False)
    _files: Mapping[str, BinaryIO] = field(repr=False)

    def read_bytes(self, name: str) -> bytes:
        """The bytes of a file, verified once more as they are handed over.

        Raises:
            DamagedError: they are no longer those of the manifest.
        """
        stream = self._files[name]
        raw = os.pread(stream.fileno(), self.manifest.files[name].bytes + 1, 0)
        while len(raw) < self.manifest.files[name].bytes:
            more = os.pread(stream.fileno(), self.manifest.files[name].bytes + 1 - len(raw), len(raw))
            if not more:
                break
            raw += more
        if hashlib.sha256(raw).hexdigest() != self.manifest.files[name].sha256:
            _damaged(self.path, f"{name} changed after it was opened")
        return raw

    def check_unchanged(self, name: str) -> None:
        """Raises DamagedError where a file was written to since it was verified."""
        if _stamp(self._files[name]) != self.stamps[name]:
            _damaged(self.path, f"{name} changed after it was opened")

    def close(self) -> None:
        """Close the files. `phrases`, `vectors`, `wide` and what was loaded from the bundle stay usable."""
        for stream in self._files.values():
            stream.close()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_bundle(path: Path, *, stamps: Mapping[str, tuple[int, ...]] | None = None) -> Bundle:
    """Verify a bundle and open it.

    The manifest's checksum and schema, the list of files, their kinds, sizes and SHA-256, and then, of bytes
    known to be the right ones, the shapes, types and counts of each file and their agreement with each other.

    Args:
        path: the bundle's folder (a link to a folder will do).
        stamps: `Bundle.stamps` of another process of this machine that has verified the bundle: files that
            are still the same ones are not read again.

    Raises:
        DamagedError: anything is missing, superfluous, altered or of another format version; it says what.
    """
    path = Path(path)
    if not path.exists():
        _damaged(path, "there is no such folder", "Check the path.")
    if not path.is_dir():
        _damaged(path, "it is no folder")
    if path.resolve().name.endswith(PARTIAL_SUFFIX):
        _damaged(path, "an export that never finished left it behind")
    return verify_folder(path, stamps=stamps)


def verify_folder(path: Path, *, stamps: Mapping[str, tuple[int, ...]] | None = None) -> Bundle:
    """`open_bundle` without the look at the folder's name, for a bundle that is still to get its own."""
    manifest = _read_manifest(path)
    _check_listing(path, manifest)
    files: dict[str, BinaryIO] = {}
    try:
        for name in sorted(manifest.files):
            files[name] = _open_regular(path, name)
        found = {name: _stamp(stream) for name, stream in files.items()}
        if found != stamps:
            _check_contents(path, manifest, files)
        phrases = _read_phrases(path, manifest, files[PHRASES])
        vectors = _read_vectors(path, manifest, files[VECTORS])
        wide = _read_wide(path, manifest, files)
        lookups = Lookups(*(_read_lookup(path, manifest, files[name], name) for name in LOOKUPS))
        _check_lookups(path, phrases, lookups)
        graph = None if manifest.milvus is not None else _read_graph(path, manifest, files, vectors)
    except BaseException:
        for stream in files.values():
            stream.close()
        raise
    return Bundle(path, manifest, phrases, vectors, graph, wide, lookups, found, files)


def read_manifest(path: Path) -> Manifest:
    """The manifest alone, its own checksum verified but not the files.

    Raises:
        DamagedError: it is missing, altered or of another format version.
    """
    return _read_manifest(Path(path))


def _read_manifest(path: Path) -> Manifest:
    if not (path / MANIFEST).exists() and not (path / MANIFEST).is_symlink():
        if (path / "checkpoints").is_dir():
            hint = f"Export it: bidmatch export --checkpoint {path} --out BUNDLE"
            _damaged(path, "it is the folder of a training run", hint)
        _damaged(path, f"it has no {MANIFEST}")
    with _open_regular(path, MANIFEST) as stream:
        raw = stream.read(_MANIFEST_LIMIT + 1)
    if len(raw) > _MANIFEST_LIMIT:
        _damaged(path, f"{MANIFEST} is larger than any manifest")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        _damaged(path, f"{MANIFEST} is no JSON")
    if not isinstance(content, dict):
        _damaged(path, f"{MANIFEST} is no JSON object")
    version = content.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise DamagedError(
            f"{path} has bundle format {version}, and this bidmatch reads format {FORMAT_VERSION}",
            hint="Install the bidmatch that wrote it, or export it again with this one.",
        )
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or MANIFEST
        _damaged(path, f"{MANIFEST}: {where}: {first['msg']}")
    if not checksum_holds(raw, manifest.checksum):
        _damaged(path, f"{MANIFEST} was altered (its checksum does not hold)")
    _check_agreement(path, manifest)
    return manifest


def _check_agreement(path: Path, manifest: Manifest) -> None:
    names = set(manifest.files)
    wanted = REQUIRED_FILES | ({ENCODER_INT8} if manifest.encoder.precision == "int8" else set())
    wanted |= WIDE_FILES if manifest.rescore is not None else set()
    wanted -= INDEX_FILES if manifest.milvus is not None else set()
    if names != wanted:
        _damaged(
            path, f"{MANIFEST} lists {', '.join(sorted(names))}; there should be {', '.join(sorted(wanted))}"
        )
    if (manifest.encoder.file == ENCODER_INT8) != (manifest.encoder.precision == "int8"):
        _damaged(path, f"{MANIFEST}: {manifest.encoder.file} cannot be {manifest.encoder.precision}")
    if manifest.index.k > manifest.counts.phrases:
        _damaged(path, f"{MANIFEST}: index.k is above the number of phrases")
    if manifest.encoder_dim > manifest.dim:
        _damaged(path, f"{MANIFEST}: encoder_dim is above dim")
    if manifest.rescore is not None and manifest.rescore.encoder_dim > manifest.rescore.dim:
        _damaged(path, f"{MANIFEST}: rescore.encoder_dim is above rescore.dim")
    if manifest.blend is not None and (manifest.blend.wide is None) != (manifest.rescore is None):
        _damaged(path, f"{MANIFEST}: blend.wide does not fit rescore")
    digests = {name: record.sha256 for name, record in manifest.files.items()}
    if bundle_id(digests, targets_of(manifest.index, manifest.rescore)) != manifest.bundle_id:
        _damaged(path, f"{MANIFEST}: bundle_id is not that of its files")


def _check_listing(path: Path, manifest: Manifest) -> None:
    found = {entry.name for entry in os.scandir(path)}
    if missing := sorted(set(manifest.files) - found):
        _damaged(path, f"{', '.join(missing)} is missing")
    if extra := sorted(found - set(manifest.files) - {MANIFEST}):
        _damaged(path, f"{', '.join(extra[:5])} does not belong to it")


def _open_regular(path: Path, name: str) -> BinaryIO:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        link = (path / name).is_symlink()
        _damaged(
            path, f"{name} is a link, not a file" if link else f"{name} cannot be read: {error.strerror}"
        )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        _damaged(path, f"{name} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _stamp(stream: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _descriptor_path(stream: BinaryIO, path: Path) -> str:
    pinned = f"/proc/self/fd/{stream.fileno()}"
    return pinned if os.path.exists(pinned) else str(path)  # noqa: PTH110


def _sha256(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    position = 0
    while block := os.pread(stream.fileno(), _BLOCK_BYTES, position):
        digest.update(block)
        position += len(block)
    return digest.hexdigest()


def _check_contents(path: Path, manifest: Manifest, files: Mapping[str, BinaryIO]) -> None:
    for name, stream in files.items():
        found, wanted = os.fstat(stream.fileno()).st_size, manifest.files[name].bytes
        if found != wanted:
            _damaged(path, f"{name} has {found:,} bytes, not {wanted:,}")
    with ThreadPoolExecutor(max_workers=min(len(files), os.cpu_count() or 1)) as pool:
        for name, digest in zip(files, pool.map(_sha256, files.values()), strict=True):
            if digest != manifest.files[name].sha256:
                _damaged(path, f"{name} was altered (its SHA-256 is not the manifest's)")


def _read_phrases(path: Path, manifest: Manifest, stream: BinaryIO) -> pa.Table:
    try:
        with pa.memory_map(_descriptor_path(stream, path / PHRASES)) as source:
            table = pa.ipc.open_file(source).read_all()
        table.validate(full=True)
    except pa.ArrowException as error:
        _damaged(path, f"{PHRASES} is no Arrow table: {error}")
    if len(set(table.column_names)) != table.num_columns:
        _damaged(path, f"{PHRASES} has two columns of one name")
    for column in ("id", "text"):
        if column not in table.column_names or table.schema.field(column).type != pa.large_string():
            _damaged(path, f"{PHRASES} has no string column {column!r}")
        if table[column].null_count:
            _damaged(path, f"{PHRASES} has empty values in {column!r}")
    if any(column.num_chunks != 1 for column in table.columns):
        _damaged(path, f"{PHRASES} is not in one piece")
    if table.num_rows != manifest.counts.phrases:
        _damaged(path, f"{PHRASES} has {table.num_rows:,} rows, not {manifest.counts.phrases:,}")
    return table


def _map_array(
    path: Path, manifest: Manifest, stream: BinaryIO, name: str, kind: str, shape: tuple[int, int]
) -> np.ndarray:
    """The array in a verified .npy file, mapped, once its header says what it must."""
    dtype = np.dtype(kind)
    try:
        stream.seek(0)
        major, _ = np.lib.format.read_magic(stream)
        if major != 1:
            _damaged(path, f"{name} is no NumPy 1.0 file")
        found, fortran, held = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        _damaged(path, f"{name} is no NumPy file: {error}")
    if found != shape or fortran or held != dtype:
        _damaged(path, f"{name} holds {held} {found}, not {dtype} {shape}")
    offset = stream.tell()
    if offset + dtype.itemsize * shape[0] * shape[1] != manifest.files[name].bytes:
        _damaged(path, f"{name} is shorter or longer than its header says")
    if not shape[0] * shape[1]:
        return np.empty(shape, dtype)  # there is nothing to map
    return np.memmap(stream, dtype=dtype, mode="r", offset=offset, shape=shape)


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    rows = max(1, _BLOCK_BYTES // (array.itemsize * array.shape[1]))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _read_vectors(path: Path, manifest: Manifest, stream: BinaryIO) -> np.ndarray:
    vectors = _map_array(path, manifest, stream, VECTORS, "<f4", (manifest.counts.phrases, manifest.dim))
    if not all(np.isfinite(block).all() for block in _blocks(vectors)):
        _damaged(path, f"{VECTORS} has values that are no numbers")
    return vectors


def _read_wide(path: Path, manifest: Manifest, files: Mapping[str, BinaryIO]) -> WideVectors | None:
    record, count = manifest.rescore, manifest.counts.phrases
    if record is None:
        return None
    rows = _map_array(path, manifest, files[WIDE], WIDE, "i1", (count, record.dim))
    scales = _map_array(path, manifest, files[WIDE_SCALES], WIDE_SCALES, "<f4", (count, 2))
    if not all((np.isfinite(block) & (block >= 0)).all() for block in _blocks(scales)):
        _damaged(path, f"{WIDE_SCALES} has values that are no scales")
    if hasattr(mmap, "MADV_RANDOM"):
        # A query reads some hundred rows from all over: reading ahead would fetch a hundred times too much.
        rows.base.madvise(mmap.MADV_RANDOM)  # type: ignore[union-attr]
    weights = wide_weights(manifest.blend)
    return WideVectors(np.asarray(rows), np.asarray(scales), record.encoder_dim, weights)


def _read_lookup(path: Path, manifest: Manifest, stream: BinaryIO, name: str) -> np.ndarray:
    count = manifest.counts.phrases
    entries = count
    if name == RUNS:
        entries = max(0, (manifest.files[name].bytes - _NPY_HEADER_BYTES) // 16)
    table = _map_array(path, manifest, stream, name, "<i8", (2, entries))
    if entries and (table[1].min() < 0 or table[1].max() >= count or (table[0][1:] < table[0][:-1]).any()):
        _damaged(path, f"{name} does not lead to the phrases")
    return np.asarray(table)


def _check_lookups(path: Path, phrases: pa.Table, lookups: Lookups) -> None:
    """That the tables are of these phrases, by a sample, and that no id is there twice."""
    for name, table, column, words in (
        (IDS, lookups.ids, "id", str),
        (KEYS, lookups.keys, "text", text.key),
    ):
        places = np.unique(np.linspace(0, table.shape[1] - 1, _SAMPLED_NODES).astype(np.int64))
        sampled = phrases[column].take(pa.array(table[1][places])).to_pylist()
        if not np.array_equal(hash_texts(words(one) for one in sampled), table[0][places]):
            _damaged(path, f"{name} is not of the phrases of {PHRASES}")
    hashes, rows = lookups.ids
    alike = np.flatnonzero(hashes[1:] == hashes[:-1])
    if len(alike):
        pairs = [phrases["id"].take(pa.array(rows[alike + at])).to_pylist() for at in (0, 1)]
        if any(one == other for one, other in zip(*pairs, strict=True)):
            _damaged(path, f"{PHRASES} has two phrases with one id")


def _read_graph(
    path: Path, manifest: Manifest, files: Mapping[str, BinaryIO], vectors: np.ndarray
) -> GraphArrays:
    count, degree = manifest.counts.phrases, manifest.index.M
    width = 2 + degree
    places = max(0, (manifest.files[UPPER].bytes - _NPY_HEADER_BYTES) // (4 * width))
    links = _map_array(path, manifest, files[LINKS], LINKS, "<u4", (count, 2 * degree))
    upper = _map_array(path, manifest, files[UPPER], UPPER, "<u4", (places, width))
    codes = _map_array(path, manifest, files[CODES], CODES, "i1", (count, manifest.dim))
    steps = _map_array(path, manifest, files[STEPS], STEPS, "<f4", (1, manifest.dim))
    if not (np.isfinite(steps) & (steps >= 0)).all():
        _damaged(path, f"{STEPS} has values that are no steps")
    if places and (upper[:, 0] >= count).any():
        _damaged(path, f"{UPPER} does not lead to the phrases")
    sampled = np.unique(np.linspace(0, count - 1, _SAMPLED_NODES).astype(np.int64))
    # Half a step, and what rounding adds to it.
    if not (np.abs(codes[sampled] * steps - vectors[sampled]) <= 0.501 * steps + 1e-6).all():
        _damaged(path, f"{CODES} is not of the vectors of {VECTORS}")
    # Neighbours of a row, up to the first number that is none.
    ended = links[sampled] >= count
    if (ended[:, :-1] & ~ended[:, 1:]).any():
        _damaged(path, f"{LINKS} does not lead to the phrases")
    return GraphArrays(*map(np.asarray, (links, upper, codes, steps)))
