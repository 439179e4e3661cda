"""The bundle that answers now, and how another one takes its place while requests go on.

A request keeps the bundle it began with; the old one goes when its last request is answered. The new one is
verified, warmed and tried on queries of late before it takes over, so a bad one never answers anybody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bidmatch.base.errors import BidmatchError, DamagedError
from export.bundle.format import MANIFEST
from export.bundle.read import Bundle, open_bundle, read_manifest
from service.cache import AnswerCache
from service.engine import Engine, EngineSettings
from service.live.phrases import LivePhrases
from service.live.store import LiveStore
from service.live.sync import Change, LiveSync, link_ahead, model_of, prepared
from service.memory import give_back_after

_PROBE_K = 10
# A bundle that leaves this share of the queries without matches which have some now is not taken.
_MOST_LOST = 0.5
# A bundle takes over with live phrases that are not linked yet where linking takes longer.
_LINKING_S = 20.0

_log = logging.getLogger("bidmatch.service")


class RefusedError(BidmatchError):
    """A bundle was not taken; the one before still answers."""


@dataclass(eq=False)
class Loaded:
    """A bundle in use.

    Attributes:
        engine: what answers.
        cache: whole answers of it.
        path: where it came from.
        live: its live phrases and the sequence up to which they are, until it takes over.
        probed: share of the probes' matches that the bundle before found, too; None without probes.
    """

    engine: Engine
    cache: AnswerCache
    path: Path
    live: tuple[LivePhrases, int] | None = field(default=None, repr=False)
    probed: float | None = None


class Probes:
    """The latest distinct queries, to try a new bundle with. They never leave memory.

    Args:
        count: most queries kept.
    """

    def __init__(self, count: int):
        self._queries: deque[str] = deque(maxlen=count)
        self._lock = threading.Lock()
        self._seen: set[str] = set()

    def record(self, query: str) -> None:
        """Remember a query, unless it is remembered."""
        if query in self._seen or not self._queries.maxlen:
            return
        with self._lock:
            if len(self._queries) == self._queries.maxlen:
                self._seen.discard(self._queries[0])
            self._queries.append(query)
            self._seen.add(query)

    def queries(self) -> list[str]:
        """All of them."""
        with self._lock:
            return list(self._queries)


class Serving:
    """What answers in this process.

    Args:
        bundle: the first one, verified.
        settings: of engines.
        cache_bytes: most bytes of cached answers.
        store: the live phrases; None where there are none.
        probes: most queries that a new bundle is tried with.
        on_change: told how many answers a change of the live phrases dropped.

    Attributes:
        current: the bundle that answers requests that come now.
        previous: id of the one before; None before the first swap.
        sync: what keeps the live phrases; None without a store.
        on_switch: told of the engine that answers from now on.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: EngineSettings,
        *,
        cache_bytes: int,
        store: LiveStore | None,
        probes: int,
        on_change: Callable[[int], None] = lambda _dropped: None,
    ):
        self._settings, self._cache_bytes, self._store = settings, cache_bytes, store
        self._on_change = on_change
        self.on_switch: Callable[[Engine], None] = lambda _engine: None
        self.probes = Probes(probes)
        self.current = self._loaded(bundle)
        self.previous: str | None = None
        self.sync: LiveSync | None = None
        if store is not None:
            self.sync = LiveSync(store, self.current.engine, self._dropping(self.current))

    def start(self) -> None:
        """Take over the live phrases; to be called after forking."""
        if self.sync is not None:
            self.sync.start()

    def stop(self) -> None:
        """End what runs beside the requests."""
        if self.sync is not None:
            self.sync.stop()

    def prepare(self, path: Path, *, stamps: dict[str, tuple[int, ...]] | None = None) -> Loaded:
        """Open a bundle, warm it and try it, beside the one that answers.

        Args:
            path: the bundle.
            stamps: of its files, where another process has verified them just now.

        Raises:
            RefusedError: it is damaged, its index does not answer, or it fails at the probes; says why.
        """
        try:
            bundle = open_bundle(path, stamps=stamps)
            loaded = self._loaded(bundle, self.current.engine)
        except BidmatchError as error:
            raise RefusedError(error.reason, hint=error.hint) from error
        except (OSError, ValueError) as error:
            raise RefusedError(f"{str(path)!r} cannot be opened: {error}") from error
        if loaded.engine.index.failure is not None:
            raise RefusedError(loaded.engine.index.failure)
        if self._store is not None:
            loaded.live = prepared(loaded.engine, self._store)
            loaded.engine.live = loaded.live[0]
            # What is not linked each search compares row by row.
            link_ahead(loaded.live[0], _LINKING_S)
        loaded.probed = self._probe(loaded.engine)
        # Requests filter by the same columns as before, and none need wait for one to be read.
        columns, before = loaded.engine.scopes.columns, self.current.engine.scopes.columns
        columns.prepare(before.read & set(columns.filterable))
        return loaded

    def switch(self, loaded: Loaded) -> None:
        """Let a prepared bundle answer from now on."""
        before = self.current
        give_back_after(before)

        def take_over() -> None:
            self.previous, self.current = self.current.engine.bundle_id, loaded

        if self.sync is not None and loaded.live is not None:
            (live, applied), loaded.live = loaded.live, None
            self.sync.switch(loaded.engine, live, applied, self._dropping(loaded), take_over)
        else:
            take_over()
        self.on_switch(loaded.engine)
        if self._store is not None:
            try:
                # Those of the bundle before stay, for a way back that encodes nothing.
                self._store.drop_models({model_of(before.engine), model_of(loaded.engine)})
            except BidmatchError as error:
                _log.warning("vectors of earlier bundles stay in the store: %s", error.reason)

    def report(self, seconds: float) -> dict[str, Any]:
        """What the latest swap did, as `schemas.Reloaded` has it."""
        engine = self.current.engine
        return {
            "bundle": engine.bundle_id,
            "previous": self.previous or engine.bundle_id,
            "phrases": len(engine),
            "live_phrases": 0 if engine.live is None else engine.live.active,
            "agreement": self.current.probed,
            "seconds": round(seconds, 3),
        }

    def _loaded(self, bundle: Bundle, before: Engine | None = None) -> Loaded:
        engine = Engine(bundle, self._settings)
        engine.measure(before)
        cache = AnswerCache(self._cache_bytes, engine.score_dim, engine.score_split)
        return Loaded(engine, cache, bundle.path)

    def _dropping(self, loaded: Loaded) -> Callable[[Change], None]:
        def changed(change: Change) -> None:
            dropped = loaded.cache.changed(change.version, change.keys, change.vectors, change.gone)
            self._on_change(dropped)

        return changed

    def _probe(self, engine: Engine) -> float | None:
        queries = self.probes.queries()
        before = self.current.engine
        if not queries or before.index.failure is not None:
            return None
        started = time.perf_counter()
        try:
            found, known = engine.match(queries, _PROBE_K), before.match(queries, _PROBE_K)
        except Exception as error:
            raise RefusedError(f"{engine.bundle.path} fails on queries of late: {error}") from error
        if not np.isfinite(found.scores).all():
            raise RefusedError(f"{engine.bundle.path} gives scores that are no numbers")
        counts, known_counts = np.diff(found.offsets), np.diff(known.offsets)
        lost = int(((counts == 0) & (known_counts > 0)).sum())
        if lost > _MOST_LOST * max(1, int((known_counts > 0).sum())):
            raise RefusedError(
                f"{engine.bundle.path} has no match for {lost} of {len(queries)} queries of late, which "
                f"{before.bundle_id} matches ({time.perf_counter() - started:.1f} s)",
                hint="Is it the right bundle? A restart takes it untried.",
            )
        ids = engine.named(found.live).ids(found.rows)
        known_ids = before.named(known.live).ids(known.rows)
        same = total = 0
        for i in range(len(queries)):
            mine = set(ids[found.offsets[i] : found.offsets[i + 1]])
            theirs = set(known_ids[known.offsets[i] : known.offsets[i + 1]])
            same, total = same + len(mine & theirs), total + len(theirs)
        return same / total if total else None


def newest_bundle(path: Path) -> Path:
    """The bundle that a path means: itself, or of a folder of bundles the one made last.

    Raises:
        DamagedError: it is neither.
    """
    if (path / MANIFEST).exists() or not path.is_dir():
        return path
    found = []
    for folder in sorted(path.iterdir()):
        # Those that are still being written have names that begin with a dot.
        if not folder.name.startswith(".") and (folder / MANIFEST).is_file():
            try:
                found.append((read_manifest(folder).created, folder))
            except DamagedError:
                continue
    if not found:
        return path
    return max(found)[1]
