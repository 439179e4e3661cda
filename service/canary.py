"""Is the index still as good as exact search? Some of the queries that are served are searched both ways.

Off the hot path: on one thread of low priority, which samples only as often as its share of one processor
allows, however many queries come.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Sequence

from export.bundle.index import IndexUnavailableError
from service.engine import Engine
from service.options import MatchOptions
from service.priority import give_way
from service.search import index_recall
from service.telemetry import Telemetry

_log = logging.getLogger("bidmatch.service")

# Of a processor's time.
_MOST_TIME = 0.02
_AVERAGED = 200


class Canary:
    """See the module.

    Args:
        share: of the queries, which are sampled; 0 turns it off.
        telemetry: gets what is found.
    """

    def __init__(self, share: float, telemetry: Telemetry):
        self._share, self._telemetry = share, telemetry
        self._chance = random.Random()
        self._waiting: queue.SimpleQueue[tuple[Engine, str, MatchOptions] | None] = queue.SimpleQueue()
        self._rest_until = 0.0
        self._latest: deque[tuple[str, int, int]] = deque(maxlen=_AVERAGED)
        self._thread: threading.Thread | None = None
        if share:
            self._thread = threading.Thread(target=self._run, name="canary", daemon=True)
            self._thread.start()

    def offer(self, engine: Engine, queries: Sequence[str], options: MatchOptions) -> None:
        """Perhaps take one of these queries as a sample; in the event loop."""
        if not self._share or time.monotonic() < self._rest_until or self._chance.random() >= self._share:
            return
        # One at a time: what it takes says when the next one may come.
        self._rest_until = math.inf
        self._waiting.put((engine, self._chance.choice(queries), options))

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._share = 0.0
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        give_way()
        while (sample := self._waiting.get()) is not None:
            engine, query, options = sample
            started = time.thread_time()
            try:
                hits, wanted = index_recall(engine, query, options)
            except IndexUnavailableError:
                hits = wanted = 0  # it is said elsewhere, and not once a sample
            except Exception:
                # What failed for this query may have failed its answer, too, which said so.
                _log.exception("the recall of a query could not be checked")
                hits = wanted = 0
            used = time.thread_time() - started
            self._rest_until = time.monotonic() + used / _MOST_TIME
            bundle = engine.bundle_id
            # Until the next sample comes they would keep a bundle that no longer serves.
            del sample, engine
            if not wanted:
                continue
            self._telemetry.canary_seconds.inc(used)
            self._telemetry.canary_hits.labels(bundle).inc(hits)
            self._telemetry.canary_wanted.labels(bundle).inc(wanted)
            self._latest.append((bundle, hits, wanted))
            mine = [(hit, of) for name, hit, of in self._latest if name == bundle]
            self._telemetry.latest_recall(bundle, *(sum(column) for column in zip(*mine, strict=True)))
