"""Opening an input file by its content: packing, kind of bytes, text encoding, where decoding fails."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from bidmatch.base.errors import ConfigError, InputError

HEAD_BYTES = 1 << 17

_FOREIGN = (
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook (.xls)", "Open it in Excel and save it as .xlsx or CSV."),
    (b"%PDF", "a PDF", "Download the report as CSV or Excel instead."),
    (b"ARROW1", "an Arrow file", "Write the log as Parquet instead."),
    (b"ORC", "an ORC file", "Write the log as Parquet instead."),
    (b"Obj\x01", "an Avro file", "Write the log as Parquet instead."),
    (b"BZh", "a bzip2 archive", "Unpack it first."),
    (b"\xfd7zXZ", "an xz archive", "Unpack it first."),
    (b"\x89PNG", "a picture", "Name the log file itself."),
    (
        b"<!DOCTYPE",
        "a web page",
        "Download the report itself; this may be a sign-in page saved under its name.",
    ),
    (b"<html", "a web page", "Download the report itself; this may be a sign-in page saved under its name."),
)

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

# A Zstandard frame, or one that is to be passed over, with which parallel writers begin.
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
_WILDCARDS = re.compile(r"[*?\[]")

_NO_CHARACTER_SETS = {"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"}

_NAMES = {
    "utf-8": "UTF-8",
    "utf-8-sig": "UTF-8 with BOM",
    "utf-16": "UTF-16",
    "utf-16-le": "UTF-16",
    "utf-16-be": "UTF-16",
}


def encoding_name(encoding: str) -> str:
    """An encoding's name for people."""
    return _NAMES.get(encoding, encoding)


def is_pattern(path: Path) -> bool:
    """Whether a path that names nothing itself can stand for several: it has `*`, `?` or `[`."""
    return _WILDCARDS.search(str(path)) is not None


class EmptyFileError(InputError):
    """An input file without any text."""

    def __init__(self, path: Path):
        super().__init__(
            "the file is empty",
            file=path,
            hint="Export the log or report again; if it has no rows, choose a longer date range.",
        )


@dataclass(frozen=True)
class Source:
    """A readable input file.

    Attributes:
        path: as the user gave it.
        kind: `parquet`, `xlsx` or `text`.
        packing: `gzip`, `zstd`, `zip` or None; `head` and `open` see through it.
        head: its first bytes (at most 128 KiB), unpacked.
    """

    path: Path
    kind: str
    packing: str | None
    head: bytes

    @contextmanager
    def open(self, advance: Callable[[int], None] | None = None) -> Iterator[BinaryIO]:
        """The unpacked bytes; `advance` is told of each block of file bytes read.

        Raises:
            InputError: the archive is damaged.
        """
        try:
            with self.path.open("rb") as raw:
                watched = cast(BinaryIO, raw if advance is None else _watched(raw, advance))
                if self.packing == "gzip":
                    with gzip.open(watched) as stream:
                        yield cast(BinaryIO, stream)
                elif self.packing == "zstd":
                    with io.BufferedReader(cast(io.RawIOBase, _Zstd(watched)), 1 << 18) as stream:
                        yield cast(BinaryIO, stream)
                elif self.packing == "zip":
                    with zipfile.ZipFile(watched) as archive, archive.open(_members(archive)[0]) as member:
                        yield cast(BinaryIO, member)
                else:
                    yield watched
        except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, _BadZstdError) as damage:
            raise InputError(
                f"the {self.packing} archive is damaged or cut short ({damage})",
                file=self.path,
                hint="Download or copy the file again; if it is still being written, wait for its end.",
            ) from damage


class _BadZstdError(Exception):
    """A Zstandard archive that cannot be unpacked."""


class _Zstd(io.RawIOBase):
    """What a Zstandard file holds, all of its frames."""

    def __init__(self, packed: BinaryIO):
        import pyarrow as pa

        self._stream = pa.input_stream(packed, compression="zstd")
        self._errors = (OSError, pa.ArrowException)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        try:
            block = self._stream.read(len(buffer))
        except self._errors as problem:
            if isinstance(problem, OSError) and problem.errno is not None:
                raise
            raise _BadZstdError(str(problem).splitlines()[0]) from problem
        buffer[: len(block)] = block
        return len(block)


class _Watched(io.RawIOBase):
    """A binary file that reports how far it has been read."""

    def __init__(self, raw: BinaryIO, advance: Callable[[int], None]):
        self._raw, self._advance = raw, advance

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._raw.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        block = self._raw.read(len(buffer))
        buffer[: len(block)] = block
        self._advance(len(block))
        return len(block)


def _watched(raw: BinaryIO, advance: Callable[[int], None]) -> io.BufferedReader:
    return io.BufferedReader(cast(io.RawIOBase, _Watched(raw, advance)), 1 << 18)


def open_source(path: Path) -> Source:
    """Look at a file's first bytes.

    Raises:
        EmptyFileError: it holds nothing.
        InputError: it is missing, a folder, unreadable, or of a kind that holds no log.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(
                "is a pipe or a device, and input is read twice", file=path, hint="Save it to a file first."
            )
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except FileNotFoundError:
        raise InputError("there is no such file", file=path, hint="Check the name and the folder.") from None
    except IsADirectoryError:
        raise InputError("is a folder, not a file", file=path) from None
    except OSError as problem:
        raise InputError(f"cannot be read ({problem.strerror})", file=path) from problem
    packing = None
    if head.startswith(b"\x1f\x8b"):
        packing = "gzip"
    elif head.startswith(b"PK\x03\x04") or head.startswith(b"PK\x05\x06"):
        if _holds_workbook(path):
            return Source(path, "xlsx", None, head)
        packing = "zip"
    elif _ZSTD.match(head):
        packing = "zstd"
    source = Source(path, "text", packing, head)
    if packing is not None:
        with source.open() as stream:
            source = Source(path, "text", packing, stream.read(HEAD_BYTES))
    if not source.head.strip():
        raise EmptyFileError(path)
    if source.head.startswith(b"PAR1"):
        if packing is not None:
            raise InputError(
                f"is a Parquet file inside a {packing} archive", file=path, hint="Unpack it first."
            )
        return Source(path, "parquet", None, head)
    for magic, name, hint in _FOREIGN:
        if source.head.startswith(magic):
            raise InputError(f"is {name}, not a log", file=path, hint=hint)
    if source.head[257:262] == b"ustar":
        raise InputError("is a tar archive, not a log", file=path, hint="Unpack it first.")
    return source


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files of an archive; folders have entries of their own in it."""
    return [info for info in archive.infolist() if not info.is_dir()]


def _holds_workbook(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in _members(archive)]
    # RuntimeError: zipfile's answer to versions and packings that it does not know.
    except (zipfile.BadZipFile, RuntimeError) as damage:
        raise InputError(
            f"the file is damaged or cut short ({damage})",
            file=path,
            hint="It starts like an Excel workbook or a zip archive. Download or save it again.",
        ) from damage
    if "xl/workbook.xml" in names:
        return True
    if len(names) != 1:
        raise InputError(
            f"is a zip archive of {len(names)} files",
            file=path,
            hint="Unpack it and name the files one by one.",
        )
    return False


def detect_encoding(source: Source, given: str | None) -> str:
    """The codec to read a text file with: the user's, else by byte-order mark or NUL pattern, else UTF-8.

    Raises:
        ConfigError: the given name is no encoding.
        InputError: the bytes are no text.
    """
    if given is not None:
        try:
            name = codecs.lookup(given).name
            # Codecs that are no character sets (hex, rot13), or that can't be read in blocks, fail here.
            codecs.getincrementaldecoder(name)().decode("a".encode(name))
            if name in _NO_CHARACTER_SETS:
                raise LookupError
        except (LookupError, TypeError, ValueError):
            raise ConfigError(
                f"there is no text encoding named {given}",
                hint="Common names: utf-8, utf-16, cp1252 (Western Excel), latin-1, shift_jis.",
            ) from None
        if name == "utf-16" and not source.head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            # Without a byte-order mark it is what Windows writes.
            return "utf-16-le"
        return "utf-8-sig" if name == "utf-8" else name
    for mark, name in _BOMS:
        if source.head.startswith(mark):
            return name
    sample = source.head[:4096]
    nuls = [sample[start::2].count(0) / max(len(sample[start::2]), 1) for start in (0, 1)]
    if nuls[1] > 0.4 and nuls[0] < 0.1:
        return "utf-16-le"
    if nuls[0] > 0.4 and nuls[1] < 0.1:
        return "utf-16-be"
    control = sum(byte < 9 or 13 < byte < 32 for byte in sample)
    if control > 0.1 * len(sample):
        raise InputError(
            "is a binary file, not text",
            file=source.path,
            hint="Readable are TSV, CSV, JSONL, Parquet and XLSX, plain or compressed by gzip or zstd.",
        )
    return "utf-8"


def decode_head(source: Source, encoding: str) -> str:
    """The head as text, undecodable bytes replaced, cut at its last line end where the file goes on."""
    text = codecs.getincrementaldecoder(encoding)("replace").decode(source.head)
    if len(source.head) >= HEAD_BYTES and "\n" in text:
        text = text[: text.rindex("\n") + 1]
    return text.removeprefix("\ufeff")


def undecodable(source: Source, encoding: str) -> InputError:
    """The error that names the first byte which is not text in `encoding`: its line and its offset."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line, offset = 1, 0
    with source.open() as stream:
        while True:
            block = stream.read(1 << 20)
            pending = len(decoder.getstate()[0])
            try:
                line += decoder.decode(block, final=not block).count("\n")
            except UnicodeDecodeError as failure:
                start = failure.start
                line += bytes(failure.object[:start]).decode(encoding, "replace").count("\n")
                offset += start - pending
                break
            offset += len(block)
            if not block:
                break
    hint = (
        "Save the file as UTF-8, or name its encoding: --encoding cp1252 suits files from Excel on Windows."
    )
    return InputError(
        f"is not {encoding_name(encoding)} text from here on (byte offset {offset:,})",
        file=source.path,
        line=line,
        hint=hint,
    )
