"""One SQLite file that many threads and processes have open at once, through forks, kills and full disks."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bidmatch.base.errors import BidmatchError, ConfigError, DamagedError
from bidmatch.base.files import PARTIAL_SUFFIX, fsync_path, remove_partials

BUSY_SECONDS = 5.0
# SQLite itself sleeps longer and longer, up to 100 ms, and may never find the lock free among busy writers.
_RETRY_SECONDS = 0.001

# SQLite folds the log back into the database after every 4 MB or so, and then writes it from the start again.
# Only writers that leave each other no pause, or a program that keeps a transaction open, make it grow more.
WAL_LIMIT_BYTES = 16 << 20
_CHECKPOINT_WAIT_MS = 200

_log = logging.getLogger("bidmatch.service")


class StoreError(BidmatchError):
    """The store could not be read or written: disk full, I/O error, or locked by others for too long.

    A write that ends with it has stored nothing; to repeat it is safe.
    """


@dataclass(frozen=True)
class Schema:
    """What is in a database.

    Args:
        application_id: 32 bits that tell the program's databases from others.
        version: of the schema.
        tables: SQL that makes the tables.
        checked: the table whose pages are checked whenever the database is opened.
    """

    application_id: int
    version: int
    tables: str
    checked: str


class Database:
    """A database in WAL mode whose commits are synced before they return.

    A process has at most two connections, one that writes and one that reads, opened when first needed; calls
    on the same one take turns. No read keeps a transaction open, so none holds up writers or lets the log
    grow. Before a process forks its connections are closed, because SQLite's locks do not survive a fork:
    parent and child each open their own.

    The methods raise StoreError where the disk or SQLite fails, DamagedError where the file turns out to be
    damaged, and ValueError once the database is closed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._wal = _log_of(path)
        self._checkpoint_at = WAL_LIMIT_BYTES
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._closed = False

    @classmethod
    def open(cls, path: Path, schema: Schema) -> Database:
        """The database at `path`, made if it is not there; several processes may do so at the same time.

        Leaves no connection open.

        Raises:
            ConfigError: the folder can't be written, or the file is another program's database.
            DamagedError: the file is damaged, or of another version of the schema.
            StoreError: the disk is full, or others have held the database's lock for too long.
        """
        try:
            with _forking:
                _make(path, schema)
                # SQLite, too, keeps its log beside the file that a link leads to.
                database = cls(path.resolve())
                with closing(database._connect()) as connection:
                    _check(database.path, connection, schema)
                _databases.add(database)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error
        except sqlite3.Error as error:
            if _error_name(error).startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
                raise _unwritable(path, str(error)) from error
            raise _failed(path, error, "It could not be opened.") from error
        return database

    def close(self) -> None:
        """Fold the log back into the database and close the connections. Harmless when closed already."""
        with self._write_lock, self._read_lock:
            self._closed = True
            if self._writer is not None:
                with suppress(sqlite3.Error):
                    _checkpoint(self._writer)
            self._disconnect()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the database's only write lock from its start.

        Committed and synced when the block ends, undone when it raises.
        """
        with self._write_lock:
            self._refuse_closed()
            try:
                if self._writer is None:
                    self._writer = self._connect()
                _begin(self._writer)
                yield self._writer
                self._writer.execute("COMMIT")
            except sqlite3.Error as error:
                # Closing the connection undoes the transaction; the next one starts with a sound connection.
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
                raise _failed(self.path, error, "Nothing was stored.") from error
            except BaseException:
                if self._writer is not None:
                    self._writer.rollback()
                raise
            self._bound_log(self._writer)

    def read(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query; its read transaction is over when this returns."""
        with self._read_lock:
            self._refuse_closed()
            try:
                if self._reader is None:
                    self._reader = self._connect()
                    self._reader.execute("PRAGMA query_only = ON")
                return self._reader.execute(query, parameters).fetchall()
            except sqlite3.Error as error:
                if self._reader is not None:
                    self._reader.close()
                    self._reader = None
                raise _failed(self.path, error, "It could not be read.") from error

    def _connect(self) -> sqlite3.Connection:
        # Never makes the file: a store that someone deleted must not come back empty without a word.
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode=rw",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        """Close the connections; both locks are held."""
        for connection in (self._writer, self._reader):
            if connection is not None:
                connection.close()
        self._writer = self._reader = None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def _bound_log(self, writer: sqlite3.Connection) -> None:
        """Empty a log that has grown large. What was committed stays so, whether that works or not."""
        try:
            size = self._wal.stat().st_size
        except OSError:
            return
        if size < self._checkpoint_at:
            return
        try:
            emptied = _checkpoint(writer)
        except sqlite3.Error as error:
            _log.warning("the log of %s (%d MB) could not be emptied: %s", self.path, size >> 20, error)
            emptied = False
        # Where others are in the way, not every write should wait for them again.
        self._checkpoint_at = WAL_LIMIT_BYTES if emptied else size + WAL_LIMIT_BYTES // 4


@contextmanager
def _waiting(connection: sqlite3.Connection, milliseconds: int) -> Iterator[None]:
    """Within, SQLite waits so long for a lock."""
    connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA busy_timeout = {round(BUSY_SECONDS * 1000)}")


def _is_busy(error: sqlite3.Error) -> bool:
    return _error_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _begin(connection: sqlite3.Connection) -> None:
    """Start a transaction with the write lock, as soon as others let go of it."""
    until = time.monotonic() + BUSY_SECONDS
    with _waiting(connection, 0):
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > until:
                    raise
            time.sleep(_RETRY_SECONDS)


def _checkpoint(writer: sqlite3.Connection) -> bool:
    """Fold the log back into the database and empty it; False where others were in the way for too long."""
    with _waiting(writer, _CHECKPOINT_WAIT_MS):
        (busy, _, _) = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _make(path: Path, schema: Schema) -> None:
    """Make the database if it is not there: whole and on disk, or not at all."""
    folder = path.parent
    new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in new_folders:
        fsync_path(made.parent)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Also where it is there: who made it may have been killed right after.
        remove_partials(path)
        if path.is_symlink() or path.exists():
            return
        wal = _log_of(path)
        if wal.exists():
            # SQLite would take a log that is left over for the new database's own.
            raise DamagedError(
                f"{path} is gone, but its log {wal.name} is still there",
                hint=f"Restore {path.name}, or delete {wal.name} to start with nothing.",
            )
        with TemporaryDirectory(prefix=f".{path.name}.", suffix=PARTIAL_SUFFIX, dir=folder) as aside:
            new = Path(aside) / path.name
            with closing(sqlite3.connect(new, isolation_level=None)) as connection:
                connection.executescript(
                    f"PRAGMA application_id = {schema.application_id};"
                    f"PRAGMA user_version = {schema.version};"
                    f"BEGIN; {schema.tables}; COMMIT;"
                    "PRAGMA journal_mode = WAL;"
                )
            fsync_path(new)
            new.rename(path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(path: Path, connection: sqlite3.Connection, schema: Schema) -> None:
    """Refuse a database that is not a sound one of this schema, or that can't be written."""

    def value(pragma: str) -> Any:
        return connection.execute(f"PRAGMA {pragma}").fetchone()[0]

    if value("page_count") == 0:
        raise _damaged(path, "it is empty")
    if value("application_id") != schema.application_id:
        raise ConfigError(f"{path} is a database of another program", hint="Name another folder.")
    version = value("user_version")
    if version != schema.version:
        raise DamagedError(
            f"{path} has version {version} of its schema, and this bidmatch reads version {schema.version}",
            hint="Use the bidmatch that wrote it, or name another folder.",
        )
    found = value(f"quick_check({schema.checked})")
    if found != "ok":
        raise _damaged(path, found)
    value("journal_mode = WAL")
    with _waiting(connection, 0):
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            # Where another process is writing, this one can, too.
            if not _is_busy(error):
                raise


def _error_name(error: sqlite3.Error) -> str:
    """SQLite's name of the error, such as SQLITE_IOERR_WRITE; empty for errors of Python's module."""
    return getattr(error, "sqlite_errorname", "")


def _failed(path: Path, error: sqlite3.Error, consequence: str) -> BidmatchError:
    """What to raise for an error of SQLite."""
    name = _error_name(error)
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return _damaged(path, str(error))
    if _is_busy(error):
        hint = f"Others have held its lock for {BUSY_SECONDS:g} seconds; try again."
    elif name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
        hint = "Make sure that its disk is sound and has room, then try again."
    else:
        hint = "Make sure that the file is there and may be written."
    return StoreError(f"{path}: {error}. {consequence}", hint=hint)


def _damaged(path: Path, reason: str) -> DamagedError:
    return DamagedError(
        f"{path} is damaged: {reason}",
        hint=f"Restore it from a backup, or move {path.name} and {path.name}-wal away to start with nothing.",
    )


def _unwritable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path.name} can't be kept in the folder {path.parent}: {reason}",
        hint="Name a folder on a local disk that this user may write.",
    )


# A child that goes on with its parent's connection, or opens one beside it, has SQLite's notes of the locks
# that the parent holds, and none of the locks: the database could be damaged. So a process holds this lock
# while it forks, and while it has a connection that is not yet among those that are closed before.
_forking = threading.Lock()
_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_held: list[Database] = []


def _before_fork() -> None:
    _forking.acquire()
    for database in _databases:
        database._write_lock.acquire()
        database._read_lock.acquire()
        database._disconnect()
        _held.append(database)


def _after_fork() -> None:
    while _held:
        database = _held.pop()
        database._read_lock.release()
        database._write_lock.release()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
