"""Opening a query log by its content: packing, Parquet or text, text encoding."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from bidmatch.base.errors import ConfigError, InputError

HEAD_BYTES = 1 << 17

_GZIP = b"\x1f\x8b"
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive or an Excel workbook"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"(\xb5/\xfd", "a Zstandard archive"),
    (b"ARROW1", "an Arrow file"),
    (b"Obj\x01", "an Avro file"),
    (b"ORC", "an ORC file"),
    (b"%PDF", "a PDF"),
)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Source:
    """A query log that can be opened.

    Attributes:
        path: the file.
        parquet: whether it is Parquet, else text.
        packed: whether it is gzip-compressed; `head` and `open` see through it.
        head: its first bytes, unpacked, at most 128 KiB.
    """

    path: Path
    parquet: bool
    packed: bool
    head: bytes

    @contextmanager
    def open(self, advance: Callable[[int], None]) -> Iterator[BinaryIO]:
        """The unpacked bytes; `advance` is told of each block of file bytes read.

        Raises:
            InputError: the archive is damaged.
        """
        try:
            with self.path.open("rb") as raw:
                watched = io.BufferedReader(cast(io.RawIOBase, _Watched(raw, advance)), 1 << 18)
                if not self.packed:
                    yield cast(BinaryIO, watched)
                    return
                with gzip.open(watched) as stream:
                    yield cast(BinaryIO, stream)
        except (EOFError, zlib.error, gzip.BadGzipFile) as damage:
            raise InputError(
                f"the gzip archive is damaged or cut short ({damage})",
                file=self.path,
                hint="Copy the file again.",
            ) from damage


class _Watched(io.RawIOBase):
    """A binary file that reports how far it has been read."""

    def __init__(self, raw: BinaryIO, advance: Callable[[int], None]):
        self._raw, self._advance = raw, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        block = self._raw.read(len(buffer))
        buffer[: len(block)] = block
        self._advance(len(block))
        return len(block)


def find_files(path: Path) -> list[Path]:
    """The file, or the files of a folder by name; hidden and underscored ones (`_SUCCESS`) are no data.

    Raises:
        InputError: there are none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(one for one in path.iterdir() if one.is_file() and one.name[0] not in "._")
    if not files:
        raise InputError("the folder holds no files", file=path)
    return files


def open_source(path: Path) -> Source | None:
    """Look at a file's first bytes; None for an empty one.

    Raises:
        InputError: it is missing, unreadable, or of a kind that holds no query log.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except FileNotFoundError:
        raise InputError("there is no such file", file=path, hint="Check the name and the folder.") from None
    except OSError as problem:
        raise InputError(f"cannot be read ({problem.strerror})", file=path) from problem
    source = Source(path, head.startswith(b"PAR1"), head.startswith(_GZIP), head)
    if source.packed:
        with source.open(lambda _: None) as stream:
            source = Source(path, False, True, stream.read(HEAD_BYTES))
        if source.head.startswith(b"PAR1"):
            raise InputError("is a Parquet file inside gzip", file=path, hint="Unpack it first.")
    for magic, name in _FOREIGN:
        if source.head.startswith(magic):
            raise InputError(
                f"is {name}, not a query log",
                file=path,
                hint="Readable are TSV, CSV, JSONL, Parquet and plain lines; text may be gzip-compressed.",
            )
    return source if source.head.strip() else None


def detect_encoding(source: Source, given: str | None) -> str:
    """The codec of a text file: the one given, else by byte-order mark or NUL pattern, else UTF-8.

    Raises:
        ConfigError: the given name is no encoding.
        InputError: the bytes are no text.
    """
    if given is not None:
        try:
            name = codecs.lookup(given).name
        except LookupError:
            raise ConfigError(
                f"there is no text encoding named {given}",
                hint="Common names: utf-8, utf-16, cp1252 (Western Excel), latin-1, shift_jis.",
            ) from None
        return "utf-8-sig" if name == "utf-8" else name
    for mark, name in _MARKS:
        if source.head.startswith(mark):
            return name
    sample = source.head[:4096]
    even, odd = (sample[start::2].count(0) / max(len(sample[start::2]), 1) for start in (0, 1))
    if odd > 0.4 and even < 0.1:
        return "utf-16-le"
    if even > 0.4 and odd < 0.1:
        return "utf-16-be"
    if sum(byte < 9 or 13 < byte < 32 for byte in sample) > 0.1 * len(sample):
        raise InputError("is a binary file, not a query log", file=source.path)
    return "utf-8"


def decode_head(source: Source, encoding: str) -> str:
    """The head as text, cut at its last line end where the file goes on; undecodable bytes are replaced."""
    text = codecs.getincrementaldecoder(encoding)("replace").decode(source.head)
    if len(source.head) >= HEAD_BYTES and "\n" in text:
        text = text[: text.rindex("\n") + 1]
    return text.removeprefix("\ufeff")
