"""What changes while the service runs: live phrases, the bundle; and why matches are what they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from bidmatch.base import text
from bidmatch.base.errors import DamagedError, InputError
from service import problems
from service.engine import Engine
from service.live.columns import problems_of
from service.live.store import (
    LiveStore,
    PhraseRecord,
    PhraseRow,
    PhraseVectors,
    State,
    StateError,
    StoreError,
)
from service.live.sync import encode_phrases, model_of
from service.problems import FieldError, ProblemError
from service.serving import Serving

Result = TypeVar("Result")

# A change is durable when it is acknowledged, and visible in this worker, unless that takes longer than this.
_VISIBLE_WITHIN_S = 5.0
_WORKERS = 2
# Calls that wait for a thread; each may bring as many phrases as a request may.
_MOST_WAITING = 100


class Reloads(Protocol):
    """What lets another bundle take over, in all workers."""

    async def reload(self, path: Path | None) -> dict[str, Any]:
        """Let a bundle take over: the one at `path`, or the one that the service's own path leads to now.

        Raises:
            ProblemError: 422 it was refused, 409 another one is about to take over.
        """
        ...


class Phrases:
    """Live phrases over HTTP: checks, stores, and waits until this worker has them.

    Args:
        serving: the bundle that answers.
        store: where live phrases are kept; None where they are off.
    """

    def __init__(self, serving: Serving, store: LiveStore | None):
        self._serving, self._store = serving, store
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="admin")
        self._in_hand = 0

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    async def off_loop(self, work: Callable[[], Result]) -> Result:
        """Do work that blocks on a thread for it.

        Raises:
            ProblemError: 429 too much waits for that.
        """
        if self._in_hand >= _WORKERS + _MOST_WAITING:
            raise ProblemError(
                429,
                "busy",
                "More calls of this kind are waiting than the service takes; try again soon.",
                headers={"Retry-After": "1"},
            )
        self._in_hand += 1
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        # When it is done, not when nobody waits for it any more.
        done.add_done_callback(self._over)
        return await asyncio.shield(done)

    def _over(self, done: asyncio.Future[Any]) -> None:
        self._in_hand -= 1
        if not done.cancelled():
            # Whoever left does not ask how it ended.
            done.exception()

    async def put(self, phrases: list[Any]) -> list[dict[str, Any]]:
        """Add or change phrases: objects with `id`, `text`, `columns`.

        Raises:
            ProblemError: 422 of columns that are none, or of another type; 404 without a store; 503 where
                nothing could be stored.
        """
        return await self._change(partial(self._put, phrases))

    async def set_state(self, id: str, state: State) -> dict[str, Any]:
        """Pause, resume or remove a phrase.

        Raises:
            ProblemError: 404 there is none, 409 it is removed; and as `put`.
        """
        return (await self._change(partial(self._set_state, id, state)))[0]

    async def get(self, id: str) -> dict[str, Any]:
        """A phrase as it is now.

        Raises:
            ProblemError: 404 there is none, 503 the store cannot be read.
        """
        return await self.off_loop(partial(self._get, id))

    def stored(self, ids: Sequence[str]) -> list[PhraseRow]:
        """The stored states of those phrases that were ever changed; reads the disk.

        Raises:
            ProblemError: 503 the store cannot be read.
        """
        if self._store is None:
            return []
        with _store_problems("store-unreadable"):
            return self._store.get_many(ids)

    async def _change(self, work: Callable[[LiveStore], list[PhraseRow]]) -> list[dict[str, Any]]:
        store = self._required()

        def change() -> list[dict[str, Any]]:
            with _store_problems("not-stored"):
                try:
                    rows = work(store)
                except StateError as error:
                    raise ProblemError(
                        409, "phrase-removed", f"{error.reason}. {error.hint or ''}".strip()
                    ) from None
                except InputError as error:
                    raise problems.invalid([FieldError(where="body.phrases", reason=error.reason)]) from None
            sync = self._serving.sync
            if sync is not None and rows:
                sync.wait_for(max(row.sequence for row in rows), _VISIBLE_WITHIN_S)
            engine = self._serving.current.engine
            return [_shown(engine, row.id, row) for row in rows]

        return await self.off_loop(change)

    def _required(self) -> LiveStore:
        if self._store is None:
            raise ProblemError(
                404,
                "live-phrases-off",
                "Live phrases are off: the service was started without a folder for them.",
            )
        return self._store

    def _put(self, phrases: list[Any], store: LiveStore) -> list[PhraseRow]:
        engine = self._serving.current.engine
        wrong = [
            FieldError(where=f"body.phrases.{at}.columns.{name[: problems.SHOWN_CHARS]}", reason=reason)
            for at, phrase in enumerate(phrases)
            for name, reason in problems_of(phrase.columns, engine.phrase_columns)
        ]
        if wrong:
            raise problems.invalid(wrong)
        records = [
            PhraseRecord(
                one.id,
                text.normalise(one.text),
                {name: value for name, value in one.columns.items() if value is not None},
            )
            for one in phrases
        ]
        vectors = encode_phrases(engine, [record.text for record in records])
        made = PhraseVectors(model_of(engine), vectors.narrow, vectors.wide)
        return store.put(records, made, since=engine.made)

    def _set_state(self, id: str, state: State, store: LiveStore) -> list[PhraseRow]:
        held = bool(self._serving.current.engine.ids.find([id]))
        row = store.set_state(id, state, held)
        if row is None:
            raise _unknown(id)
        return [row]

    def _get(self, id: str) -> dict[str, Any]:
        engine = self._serving.current.engine
        row = next(iter(self.stored([id])), None)
        if row is None and not engine.ids.find([id]):
            raise _unknown(id)
        return _shown(engine, id, row)


@contextmanager
def _store_problems(kind: str) -> Iterator[None]:
    """Failures of the store as what to answer: a problem of this kind, or that the store is damaged."""
    try:
        yield
    except StoreError as error:
        raise ProblemError(
            503, kind, f"{error.reason} The call can be repeated.", headers={"Retry-After": "1"}
        ) from None
    except DamagedError as error:
        raise ProblemError(503, "store-damaged", f"{error.reason}. {error.hint}") from None


def _unknown(id: str) -> ProblemError:
    return ProblemError(404, "no-such-phrase", f"There is no phrase {id[:200]!r}.")


def _shown(engine: Engine, id: str, row: PhraseRow | None) -> dict[str, Any]:
    """A phrase as `schemas.PhraseState` has it: of the bundle, unless a live one stands for it."""
    held = engine.ids.find([id]).get(id)
    stands = row is not None and row.text is not None and not (held is not None and engine.serves(held, row))
    changed = (
        datetime.fromtimestamp(row.changed / 1e3, UTC).isoformat(timespec="milliseconds")
        if row is not None
        else engine.bundle.manifest.created
    )
    state = "active" if row is None else row.state
    if stands and row is not None:
        phrase, columns = str(row.text), dict(row.columns)
    elif held is not None:
        _, (phrase,), (columns,) = engine.named(None).take(np.array([held]))
    else:
        phrase, columns = "", {}
    return {
        "id": id,
        "text": phrase,
        "columns": columns,
        "state": state,
        "source": "live" if stands else "bundle",
        "changed": changed,
    }
