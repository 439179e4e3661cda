"""Files and folders that appear whole or not at all, and their fingerprints."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bidmatch.base.errors import BidmatchError, ConfigError

PARTIAL_SUFFIX = ".partial"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")


def remove_partials(path: Path) -> None:
    """Delete what killed writers of `path` left behind. Call only where no other writer can be running."""
    for left in path.parent.glob(f".{path.name}.*{PARTIAL_SUFFIX}"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def shown(path: Path) -> str:
    """A path as text that can be written anywhere; bytes of a name that are no UTF-8 come as escapes."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def refuse_name_not_utf8(path: Path) -> None:
    """Refuse an output whose name is no UTF-8: not all that write files can name it.

    Raises:
        ConfigError: it is not.
    """
    if shown(path) != str(path):
        raise ConfigError(f"the name {shown(path)} is not UTF-8", hint="Name another output.")


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Refuse an output file that is there, unless it is to be replaced.

    Raises:
        BidmatchError: it is there and `overwrite` is false.
    """
    if path.exists() and not overwrite:
        raise BidmatchError(f"{path} already exists", hint="Name another file, or pass --overwrite.")


def refuse_inside(path: Path, folder: Path, what: str) -> None:
    """Refuse an output inside a folder that has to stay as it is.

    Raises:
        BidmatchError: it lies there.
    """
    if path.resolve().is_relative_to(folder.resolve()):
        raise BidmatchError(
            f"{path} is inside {folder}, and a {what} holds nothing but its own files",
            hint="Name a file outside of it.",
        )


def refuse_folder(path: Path, what: str, is_ours: Callable[[Path], bool], *, overwrite: bool) -> None:
    """Refuse an output folder that is there, unless it is to be replaced and holds what is written there.

    Args:
        path: the folder.
        what: it has to be to be replaced, in words: "bundle".
        is_ours: whether a folder with something in it is that.
        overwrite: it is to be replaced.

    Raises:
        BidmatchError: it is there and `overwrite` is false, or it is something else.
    """
    if not path.exists():
        return
    if not overwrite:
        raise BidmatchError(f"{path} already exists", hint="Name another folder, or pass --overwrite.")
    if not path.is_dir() or (any(path.iterdir()) and not is_ours(path)):
        raise BidmatchError(
            f"{path} is no {what} or holds other files, too, so --overwrite does not replace it",
            hint="Name another folder.",
        )


@contextmanager
def locked(file: Path, taken: str) -> Iterator[None]:
    """Hold a lock file, made if need be, for as long as the process is within or until it ends.

    Raises:
        BidmatchError: another process holds it; `taken` says so.
    """
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as held:
            raise BidmatchError(taken, hint="Wait for it, or name another folder.") from held
        yield


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is fsynced and renamed over `path`.

    Raises:
        BidmatchError: `path` is there and is no file, such as a device, which a rename would replace.
    """
    if path.exists() and not path.is_file():
        raise BidmatchError(f"{path} is no file that can be replaced", hint="Name a file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_name(path)
    try:
        yield partial
        fsync_path(partial)
        partial.replace(path)
        fsync_path(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, so that the name always holds a whole one; False where that can't be."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0)


@contextmanager
def atomic_dir(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success all of it is fsynced and renamed to `path`.

    With `overwrite`, an existing folder is swapped with the new one and deleted after (on systems without
    an atomic swap it is moved aside first). What earlier, killed writers of `path` left beside it is removed
    first, unless another writer is at work in the same parent folder.

    Raises:
        BidmatchError: `path` exists, or came into being meanwhile, and `overwrite` is false.
    """
    taken = BidmatchError(f"{path} already exists", hint="Name another folder, or pass --overwrite.")
    if path.exists() and not overwrite:
        raise taken
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_name(path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        # Every writer holds the parent folder's shared lock, so who gets the exclusive one is alone. A file
        # system without locks grants none, and nothing is removed there.
        with suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_partials(path)
        with suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_SH)
        partial.mkdir()
        yield partial
        for entry in sorted(partial.rglob("*")):
            fsync_path(entry)
        fsync_path(partial)
        if not path.exists():
            partial.rename(path)
        elif not overwrite:
            raise taken
        elif not _exchange(partial, path):
            aside = _partial_name(path)
            path.rename(aside)
            partial.rename(path)
            shutil.rmtree(aside, ignore_errors=True)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(parent)
