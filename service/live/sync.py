"""Keeps a worker's live phrases what the store says: applies changes as they come, whoever made them.

One thread a worker looks for changes ten times a second, or at once when this worker made one, and in between
links new rows into the graph. It runs at low priority where the system has priorities for threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bidmatch.base import text
from bidmatch.base.errors import BidmatchError
from export.bundle.encoder import QueryVectors
from service.engine import Engine
from service.live.phrases import LivePhrases
from service.live.store import LiveStore, PhraseRow, PhraseVectors
from service.priority import give_way

POLL_S = 0.1
_CHANGES = 1000
_LINK_AT_ONCE = 16
_ENCODE_AT_ONCE = 32
# Rows that no search returns are cleared away when they are as many as this, and as the others.
_MANY_WASTED = 4096

_log = logging.getLogger("bidmatch.service")


@dataclass(frozen=True)
class Change:
    """What one application of changes did, for a cache of answers.

    Attributes:
        version: of the live phrases after it.
        keys: keys of the phrases that came.
        vectors: float32 (m, dim), theirs, as they are scored.
        gone: ids of the phrases that left or changed.
    """

    version: int
    keys: list[str]
    vectors: np.ndarray
    gone: list[str]


def model_of(engine: Engine) -> str:
    """Names the vectors that this engine's encoder makes."""
    files = engine.bundle.manifest.files
    record = engine.bundle.manifest.encoder
    name = "encoder.int8.onnx" if engine.encoder.precision == "int8" else "encoder.onnx"
    return f"{files[name].sha256[:16]}-{files['tokenizer.json'].sha256[:16]}-{record.max_tokens}"


def encode_phrases(engine: Engine, texts: Sequence[str]) -> QueryVectors:
    """The encoder's [Φ_D(z) ⊕ N(Φ_C(z))] of texts, each encoded alone, so that it depends on no other."""
    parts = [engine.encoder.encode([one]) for one in texts]
    if not parts:
        return engine.encoder.encode([])
    return QueryVectors(
        np.concatenate([part.narrow for part in parts]), np.concatenate([part.wide for part in parts])
    )


def vectors_of(engine: Engine, store: LiveStore, phrases: Sequence[PhraseRow]) -> QueryVectors:
    """The vectors of live phrases: those the store holds, and the others encoded and stored."""
    encoder = engine.encoder
    model = model_of(engine)
    found = store.vectors(model, phrases, encoder.dim, encoder.wide_dim)
    vectors = QueryVectors(
        np.zeros((len(phrases), encoder.dim), np.float32),
        np.zeros((len(phrases), encoder.wide_dim), np.float32),
    )
    vectors.narrow[found.positions], vectors.wide[found.positions] = found.narrow, found.wide
    missing = np.setdiff1d(np.arange(len(phrases)), found.positions)
    for start in range(0, len(missing), _ENCODE_AT_ONCE):
        places = missing[start : start + _ENCODE_AT_ONCE]
        some = [phrases[at] for at in places.tolist()]
        made = encode_phrases(engine, [str(one.text) for one in some])
        vectors.narrow[places], vectors.wide[places] = made.narrow, made.wide
        store.put_vectors(some, PhraseVectors(model, made.narrow, made.wide))
    return vectors


def apply_changes(engine: Engine, live: LivePhrases, store: LiveStore, rows: Sequence[PhraseRow]) -> Change:
    """Apply the latest state of some phrases to live phrases, and say what that did."""
    placed = [row for row in rows if live.wants_vector(row)]
    vectors = vectors_of(engine, store, placed)
    came = [row for row in rows if row.state == "active"]
    live.apply(rows, vectors)
    # A phrase of the bundle that serves again comes, too, with the vector that it has there.
    others = [row for row in came if not live.holds(row.id)]
    found = engine.ids.find([row.id for row in others])
    scored = engine.scored_vectors(np.array(sorted(found.values()), np.int64))
    keys = [text.key(str(row.text)) for row in placed]
    keys += [
        text.key(one)
        for one in engine.phrases(np.array(sorted(found.values()), np.int64))["text"].to_pylist()
    ]
    return Change(
        live.version,
        keys,
        np.concatenate([live.scored(vectors), scored]),
        [row.id for row in rows],
    )


class LiveSync:
    """See the module. `start` it after the fork; `stop` it before the store is closed.

    Args:
        store: the durable store.
        engine: the engine whose `live` is kept; another one takes its place with `switch`.
        on_change: told of each change, in this thread, after it is visible to searches.
    """

    def __init__(self, store: LiveStore, engine: Engine, on_change: Callable[[Change], None]):
        self._store, self._engine, self._on_change = store, engine, on_change
        self._applied = 0
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)
        self.failure: str | None = None

    @property
    def applied(self) -> int:
        """The sequence up to which changes are visible here."""
        return self._applied

    def start(self) -> None:
        """Take over what the store holds; returns when all of it is visible.

        Raises:
            StoreError: the store can't be read.
        """
        live, applied = prepared(self._engine, self._store)
        self._engine.live = live
        self._applied = applied
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait_for(self, sequence: int, timeout: float) -> bool:
        """Wait until a change is visible in this worker; whether it is, after `timeout` seconds at most."""
        self._wake.set()
        with self._moved:
            return self._moved.wait_for(lambda: self._applied >= sequence, timeout)

    def switch(
        self,
        engine: Engine,
        live: LivePhrases,
        applied: int,
        on_change: Callable[[Change], None],
        take_over: Callable[[], None],
    ) -> None:
        """Go on with another engine, whose live phrases hold all changes up to `applied`.

        `take_over` is called when they hold all there are, before anybody hears that one is visible here.
        """
        with self._moved:
            engine.live = live
            self._engine, self._on_change = engine, on_change
            self._applied = applied
            try:
                while self._apply_some():
                    pass
            except BidmatchError as error:
                # The thread tries again.
                _log.error("live phrases can't follow the store: %s", error.reason)
            take_over()
            self._moved.notify_all()

    def _run(self) -> None:
        give_way()
        while not self._stopped:
            # Before the look at the store: who wakes this thread later has it look again.
            self._wake.clear()
            try:
                self._catch_up()
                self._tidy()
                if self.failure is not None:
                    _log.warning("live phrases follow the store again")
                    self.failure = None
            except Exception as error:
                reason = error.reason if isinstance(error, BidmatchError) else repr(error)
                if self.failure is None:
                    _log.error("live phrases can't follow the store: %s", reason, exc_info=error)
                self.failure = reason
            until = time.monotonic() + POLL_S
            while not (self._wake.is_set() or self._stopped):
                left = until - time.monotonic()
                if left <= 0:
                    break
                live = self._engine.live
                if live is None or not live.link(_LINK_AT_ONCE):
                    self._wake.wait(left)

    def _catch_up(self) -> None:
        more = True
        while more:
            with self._moved:
                more = self._apply_some()
                self._moved.notify_all()

    def _apply_some(self) -> bool:
        """Apply the next changes, holding the lock; False where there were none."""
        if self._store.last_sequence() == self._applied:
            return False
        rows = self._store.changes(self._applied, _CHANGES)
        if not rows:
            return False
        live = self._engine.live
        assert live is not None
        self._on_change(apply_changes(self._engine, live, self._store, rows))
        self._applied = rows[-1].sequence
        return True

    def _tidy(self) -> None:
        """Begin anew with the phrases that are left where most rows are those of phrases that are gone.

        Meanwhile changes are applied as ever, and once more in the end.
        """
        engine, live = self._engine, self._engine.live
        if live is None or live.wasted < _MANY_WASTED or live.wasted < live.active:
            return
        fresh, applied = prepared(engine, self._store, self._catch_up)
        while not self._stopped and fresh.link(_LINK_AT_ONCE):
            self._catch_up()
        with self._moved:
            _follow(engine, fresh, self._store, applied)
            if self._engine is engine and engine.live is live:
                # Of what is newer than `applied` here, a cache is told when it is applied again.
                fresh.version = live.version
                engine.live = fresh


def prepared(
    engine: Engine, store: LiveStore, between: Callable[[], None] = lambda: None
) -> tuple[LivePhrases, int]:
    """Live phrases for an engine with all that the store holds, and the sequence up to which that is.

    Args:
        engine: the engine.
        store: the store.
        between: called now and then, for this takes seconds for 100,000 phrases.
    """
    live = engine.new_live()
    return live, _follow(engine, live, store, 0, between)


def link_ahead(live: LivePhrases, seconds: float) -> None:
    """Link rows at low priority until all are linked, or so many seconds passed."""
    until = time.monotonic() + seconds

    def work() -> None:
        give_way()
        while time.monotonic() < until and live.link(_LINK_AT_ONCE):
            pass

    linking = threading.Thread(target=work, name="link", daemon=True)
    linking.start()
    linking.join()


def _follow(
    engine: Engine,
    live: LivePhrases,
    store: LiveStore,
    applied: int,
    between: Callable[[], None] = lambda: None,
) -> int:
    """Apply what has changed since, and say up to where that is."""
    while True:
        rows = store.changes(applied, _CHANGES)
        if rows:
            live.apply(rows, vectors_of(engine, store, [row for row in rows if live.wants_vector(row)]))
            applied = rows[-1].sequence
        if len(rows) < _CHANGES:
            return applied
        between()
