"""The durable store of live phrases: one SQLite file that all workers have open at once.

What is acknowledged is on disk: every change is one transaction that is synced before its call returns. Each
change of a phrase gets the next number of one sequence, given inside of the transaction that holds the
database's only write lock, so commits become visible in the order of their numbers: who has seen all up to
a number and asks for what came after it misses nothing.

A phrase has one row, its latest; removed phrases keep theirs, so that every worker hears of the removal. Rows
whose source is `bundle` hold no text: they say that a phrase of the bundle is paused or removed (or resumed).

Beside the phrases lie their vectors, one a model, so that neither a restart nor another worker encodes again.
They belong to a text, not to a change: pausing keeps them; a new text and a removal delete them.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson

from bidmatch.base.errors import BidmatchError, DamagedError, InputError
from service.live.database import Database, Schema, StoreError

__all__ = [
    "FoundVectors",
    "LiveStore",
    "PhraseRecord",
    "PhraseRow",
    "PhraseVectors",
    "Source",
    "State",
    "StateError",
    "StoreError",
]

State = Literal["active", "paused", "removed"]
Source = Literal["live", "bundle"]

FILE_NAME = "live.db"
SCHEMA_VERSION = 2
# SQLite before 3.32 takes no more than 999 parameters.
_IDS_A_QUERY = 500
_VECTORS_A_TRANSACTION = 1000

_SCHEMA = Schema(
    application_id=int.from_bytes(b"bidm", "big"),
    version=SCHEMA_VERSION,
    tables="""
        CREATE TABLE phrases (
            id TEXT NOT NULL PRIMARY KEY,
            text TEXT,
            columns TEXT NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('active', 'paused', 'removed')),
            source TEXT NOT NULL CHECK (source IN ('live', 'bundle')),
            changed INTEGER NOT NULL,
            sequence INTEGER NOT NULL,
            edited INTEGER NOT NULL,
            CHECK ((text IS NULL) = (source = 'bundle'))
        );
        CREATE UNIQUE INDEX phrases_by_sequence ON phrases (sequence);
        CREATE TABLE vectors (
            id TEXT NOT NULL REFERENCES phrases (id) ON DELETE CASCADE,
            model TEXT NOT NULL,
            narrow BLOB NOT NULL,
            wide BLOB NOT NULL,
            PRIMARY KEY (id, model)
        )
    """,
    checked="phrases",
)

_COLUMNS = "id, text, columns, state, source, changed, sequence, edited"
_LAST = "SELECT coalesce(max(sequence), 0) FROM phrases"
_WRITE_PHRASE = f"""
INSERT INTO phrases ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET text = excluded.text, columns = excluded.columns, state = excluded.state,
    source = excluded.source, changed = excluded.changed, sequence = excluded.sequence,
    edited = excluded.edited
"""
_WRITE_VECTOR = """
INSERT INTO vectors (id, model, narrow, wide)
SELECT id, ?, ?, ? FROM phrases WHERE id = ? AND text = ? AND state <> 'removed'
ON CONFLICT (id, model) DO UPDATE SET narrow = excluded.narrow, wide = excluded.wide
"""


class StateError(BidmatchError):
    """A phrase can't go from the state it is in to the one asked for."""


@dataclass(frozen=True, slots=True)
class PhraseRecord:
    """A phrase to add or change.

    Args:
        id: names the phrase, in the bundle, too.
        text: the phrase as the advertiser wrote it.
        columns: its other columns, such as its match type; anything that JSON can hold.
    """

    id: str
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhraseRow:
    """A phrase as it is stored.

    Args:
        id: names the phrase.
        text: the phrase; None for a phrase that only the bundle holds.
        columns: its other columns, with the keys in order; empty without text.
        state: whether it can be matched.
        source: `live`: added here; `bundle`: only the state of one of the bundle's phrases.
        changed: when it was last changed, Unix time in milliseconds.
        sequence: number of that change, above those of all changes before.
        edited: when text and columns were last given, likewise; 0 where they never were. States leave it.
    """

    id: str
    text: str | None
    columns: dict[str, Any]
    state: State
    source: Source
    changed: int
    sequence: int
    edited: int


@dataclass(frozen=True, slots=True)
class PhraseVectors:
    """One model's vectors of n phrases, in their order.

    Args:
        model: names the encoder. Models whose vectors of one text differ need different names.
        narrow: float32 [n, width], what is searched.
        wide: float32 [n, wide width], what re-scores; width 0 for a model without.
    """

    model: str
    narrow: np.ndarray
    wide: np.ndarray


@dataclass(frozen=True, slots=True)
class FoundVectors:
    """The vectors that the store holds of some of the phrases that were asked for.

    Args:
        positions: int64 [m], rising: which of the phrases.
        narrow: float32 [m, width].
        wide: float32 [m, wide width].
    """

    positions: np.ndarray
    narrow: np.ndarray
    wide: np.ndarray


class LiveStore:
    """Live phrases and their vectors in one file. Safe to use from many threads and processes at once.

    A store may be used before workers are forked, and in them. Calls of one process take turns, reads with
    reads and writes with writes; neither waits for the other.

    Every method raises StoreError where the disk or SQLite fails, DamagedError where the file turns out to be
    damaged, and ValueError once the store is closed.
    """

    def __init__(self, database: Database):
        self._database = database

    @classmethod
    def open(cls, folder: Path) -> LiveStore:
        """The store in `folder`, made if it is not there yet; several processes may do so at the same time.

        Checks the pages of the phrases, not those of the vectors: milliseconds for 100,000 phrases.

        Raises:
            ConfigError: the folder can't be written, or `live.db` in it is another program's database.
            DamagedError: `live.db` is damaged, or of another version of the store.
            StoreError: the disk is full, or others have held the store's lock for too long.
        """
        return cls(Database.open(folder / FILE_NAME, _SCHEMA))

    @property
    def path(self) -> Path:
        """The database file."""
        return self._database.path

    def close(self) -> None:
        """Fold the log back into the database and let go of the file. Harmless when closed already."""
        self._database.close()

    def __enter__(self) -> LiveStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(
        self, phrases: Sequence[PhraseRecord], vectors: PhraseVectors | None = None, *, since: int = 0
    ) -> list[PhraseRow]:
        """Add or change phrases, all of them or none; they are on disk when this returns.

        A removed phrase becomes active again, a paused one stays paused. A phrase that is stored just so
        already, and was given after `since`, is not changed. Of records with the same id the last counts.

        Args:
            phrases: n records.
            vectors: theirs, stored in the same transaction.
            since: Unix time in milliseconds, such as when the bundle was made, which may know other texts
                than were given before it.

        Returns:
            The row of each record's phrase, in their order.

        Raises:
            InputError: a record holds what can't be stored, such as lone surrogates or columns beyond JSON.
            StoreError: nothing was stored.
        """
        columns_of = [_columns_text(phrase) for phrase in phrases]
        vector_rows: list[tuple[Any, ...]] = []
        if vectors is not None:
            _refuse_misfit(phrases, vectors)
            vector_rows = _vector_rows(phrases, vectors.model, vectors.narrow, vectors.wide)
        with self._database.writing() as connection:
            stored = _stored(connection, [phrase.id for phrase in phrases])
            sequence, now = _last(connection), _now()
            changed: set[str] = set()
            new_texts: set[str] = set()
            for phrase, columns in zip(phrases, columns_of, strict=True):
                before = stored.get(phrase.id)
                state: State = "paused" if before is not None and before.state == "paused" else "active"
                after = (phrase.id, phrase.text, columns, state, "live")
                if before is not None and before[:5] == after and before.edited > since:
                    continue
                if before is not None and before.text != phrase.text:
                    new_texts.add(phrase.id)
                sequence += 1
                stored[phrase.id] = _Stored(
                    phrase.id, phrase.text, columns, state, "live", now, sequence, now
                )
                changed.add(phrase.id)
            connection.executemany("DELETE FROM vectors WHERE id = ?", [(id,) for id in new_texts])
            connection.executemany(_WRITE_PHRASE, [stored[id] for id in changed])
            connection.executemany(_WRITE_VECTOR, vector_rows)
        return [_row(stored[phrase.id]) for phrase in phrases]

    def set_state(self, id: str, state: State, in_bundle: bool) -> PhraseRow | None:
        """Pause, resume (`active`) or remove a phrase; it is on disk when this returns.

        A phrase that is in that state already is not changed. Resuming a phrase of the bundle leaves a row
        that says so, a change like any other. A removed phrase can only be removed again, or added by `put`.

        Args:
            id: the phrase.
            state: the state it gets.
            in_bundle: the bundle holds a phrase of this id.

        Returns:
            The row, or None where there is no such phrase: neither a live one, nor in the bundle.

        Raises:
            StateError: it is removed, and `state` is another.
            StoreError: nothing was stored.
        """
        with self._database.writing() as connection:
            before = _stored(connection, [id]).get(id)
            if before is None:
                before = _Stored(id, None, "{}", None, "bundle", 0, 0, 0)
            if before.source == "bundle" and not in_bundle:
                return None
            if before.state == state:
                return _row(before)
            if before.state == "removed":
                raise StateError(
                    f"phrase {id!r} is removed, so it can't become {state}", hint="Add it again instead."
                )
            after = before._replace(state=state, changed=_now(), sequence=_last(connection) + 1)
            connection.execute(_WRITE_PHRASE, after)
            if state == "removed":
                connection.execute("DELETE FROM vectors WHERE id = ?", (id,))
        return _row(after)

    def get(self, id: str) -> PhraseRow | None:
        """The row of a phrase, or None where it has none; removed phrases have one."""
        found = self._database.read(f"SELECT {_COLUMNS} FROM phrases WHERE id = ?", (id,))
        return _row(found[0]) if found else None

    def get_many(self, ids: Sequence[str]) -> list[PhraseRow]:
        """The rows of those of these phrases, none twice, that have one."""
        found = []
        for start in range(0, len(ids), _IDS_A_QUERY):
            part = ids[start : start + _IDS_A_QUERY]
            query = f"SELECT {_COLUMNS} FROM phrases WHERE id IN ({_marks(len(part))})"
            found += self._database.read(query, tuple(part))
        return [_row(one) for one in found]

    def count(self) -> dict[tuple[State, Source], int]:
        """How many rows there are of each state and source, where there are any. Reads all rows."""
        found = self._database.read("SELECT state, source, count(*) FROM phrases GROUP BY state, source")
        return {(state, source): count for state, source, count in found}

    def changes(self, after: int, limit: int) -> list[PhraseRow]:
        """The phrases that have changed since, each once, as it was left by its latest change.

        Call it again with the last row's sequence until fewer than `limit` come back, and nothing is missed,
        whatever is written meanwhile: a phrase that changes again moves to the end.

        Args:
            after: the sequence up to which all changes are known; 0 at first.
            limit: at most so many rows. Other reads of the process wait meanwhile: some thousands are right.

        Returns:
            Rows in order of sequence.
        """
        found = self._database.read(
            f"SELECT {_COLUMNS} FROM phrases WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, limit)
        )
        return [_row(values) for values in found]

    def last_sequence(self) -> int:
        """The sequence of the latest change, 0 before the first. Some microseconds, so made for polling."""
        last: int = self._database.read(_LAST)[0][0]
        return last

    def put_vectors(self, phrases: Sequence[PhraseRow | PhraseRecord], vectors: PhraseVectors) -> int:
        """Store vectors of phrases, in a transaction for every 1,000. They replace the model's earlier ones.

        A phrase that is gone, or whose text is no longer the one given here, is left out.

        Args:
            phrases: n phrases, with the texts that were encoded.
            vectors: theirs.

        Returns:
            Of how many phrases vectors were stored.
        """
        _refuse_misfit(phrases, vectors)
        stored = 0
        for start in range(0, len(phrases), _VECTORS_A_TRANSACTION):
            part = slice(start, start + _VECTORS_A_TRANSACTION)
            rows = _vector_rows(phrases[part], vectors.model, vectors.narrow[part], vectors.wide[part])
            with self._database.writing() as connection:
                stored += connection.executemany(_WRITE_VECTOR, rows).rowcount
        return stored

    def vectors(
        self, model: str, phrases: Sequence[PhraseRow], width: int, wide_width: int = 0
    ) -> FoundVectors:
        """What the store holds of a model's vectors of these phrases' very texts.

        Left out are phrases without such vectors, with vectors of other widths, and those whose text has
        changed since the row was read.

        Args:
            model: as in `PhraseVectors`.
            phrases: n rows.
            width: numbers in a narrow vector.
            wide_width: numbers in a wide vector, 0 for a model without.
        """
        narrow = np.empty((len(phrases), width), np.float32)
        wide = np.empty((len(phrases), wide_width), np.float32)
        positions: list[int] = []
        for start in range(0, len(phrases), _IDS_A_QUERY):
            part = phrases[start : start + _IDS_A_QUERY]
            rows = self._database.read(
                "SELECT phrases.id, text, narrow, wide FROM vectors JOIN phrases ON phrases.id = vectors.id "
                "WHERE model = ? AND length(narrow) = ? AND length(wide) = ? "
                f"AND vectors.id IN ({_marks(len(part))})",
                (model, 4 * width, 4 * wide_width, *(phrase.id for phrase in part)),
            )
            blobs = {(id, text): (narrow_blob, wide_blob) for id, text, narrow_blob, wide_blob in rows}
            hits = [i for i, phrase in enumerate(part) if (phrase.id, phrase.text) in blobs]
            found = [blobs[part[i].id, part[i].text] for i in hits]
            filled = slice(len(positions), len(positions) + len(hits))
            narrow[filled] = _matrix([blob for blob, _ in found], width)
            wide[filled] = _matrix([blob for _, blob in found], wide_width)
            positions.extend(start + i for i in hits)
        count = len(positions)
        return FoundVectors(np.array(positions, np.int64), narrow[:count], wide[:count])

    def drop_models(self, keep: set[str]) -> int:
        """Delete the vectors of all models but these, in a transaction for every 1,000; returns how many."""
        after, dropped = 0, 0
        while True:
            with self._database.writing() as connection:
                (last,) = connection.execute(
                    "SELECT max(rowid) FROM "
                    "(SELECT rowid FROM vectors WHERE rowid > ? ORDER BY rowid LIMIT ?)",
                    (after, _VECTORS_A_TRANSACTION),
                ).fetchone()
                if last is None:
                    return dropped
                dropped += connection.execute(
                    "DELETE FROM vectors "
                    f"WHERE rowid > ? AND rowid <= ? AND model NOT IN ({_marks(len(keep))})",
                    (after, last, *keep),
                ).rowcount
            after = last


def _now() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


def _last(connection: sqlite3.Connection) -> int:
    last: int = connection.execute(_LAST).fetchone()[0]
    return last


def _marks(count: int) -> str:
    return ",".join("?" * count)


class _Stored(NamedTuple):
    """A row of the table, with the columns as canonical JSON; the state is None before there is a row."""

    id: str
    text: str | None
    columns: str
    state: State | None
    source: Source
    changed: int
    sequence: int
    edited: int


def _stored(connection: sqlite3.Connection, ids: Sequence[str]) -> dict[str, _Stored]:
    """The rows of these ids, by id."""
    stored: dict[str, _Stored] = {}
    for start in range(0, len(ids), _IDS_A_QUERY):
        part = ids[start : start + _IDS_A_QUERY]
        query = f"SELECT {_COLUMNS} FROM phrases WHERE id IN ({_marks(len(part))})"
        rows = connection.execute(query, part).fetchall()
        stored.update((row.id, row) for row in map(_Stored._make, rows))
    return stored


def _columns_text(phrase: PhraseRecord) -> str:
    """A record's columns as canonical JSON: the same columns give the same text."""
    try:
        phrase.id.encode()
        phrase.text.encode()
        return orjson.dumps(dict(phrase.columns), option=orjson.OPT_SORT_KEYS).decode()
    except (UnicodeEncodeError, TypeError) as error:
        raise InputError(f"phrase {phrase.id!r} can't be stored: {error}") from error


def _row(values: tuple[Any, ...]) -> PhraseRow:
    id, text, columns, state, source, changed, sequence, edited = values
    try:
        held = orjson.loads(columns)
    except orjson.JSONDecodeError:
        held = None
    if not isinstance(held, dict):
        raise DamagedError(
            f"live.db is damaged: the columns of phrase {id!r} are no JSON object",
            hint="Restore the folder from a backup; the bundle's own phrases are not in it.",
        )
    return PhraseRow(id, text, held, state, source, changed, sequence, edited)


def _refuse_misfit(phrases: Sequence[PhraseRow | PhraseRecord], vectors: PhraseVectors) -> None:
    shapes = vectors.narrow.shape, vectors.wide.shape
    if any(len(shape) != 2 or shape[0] != len(phrases) for shape in shapes):
        raise ValueError(f"vectors of shapes {shapes[0]} and {shapes[1]} for {len(phrases)} phrases")


def _vector_rows(
    phrases: Sequence[PhraseRow | PhraseRecord], model: str, narrow: np.ndarray, wide: np.ndarray
) -> list[tuple[Any, ...]]:
    """The parameters of `_WRITE_VECTOR`, a tuple for each phrase."""
    narrow, wide = np.ascontiguousarray(narrow, "<f4"), np.ascontiguousarray(wide, "<f4")
    return [
        (model, narrow[i].tobytes(), wide[i].tobytes(), phrase.id, phrase.text)
        for i, phrase in enumerate(phrases)
    ]


def _matrix(rows: list[bytes], width: int) -> np.ndarray:
    return np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), width)
